"""For whoever writes into the model between steps, saves it, or has odd gradients: what a bucket has to know besides.

What load_state_dict() has written is what is stepped next. A gradient may be sparse, or missing. Each parameter has a
storage of its own: safetensors, accelerate and pickle take views of one storage for one tensor. Shown by
tests/stages/test_models.py, `test_each_parameter_has_a_storage_of_its_own`, and tests/stages/test_hostile.py.
"""

import torch

from guard.pieces import follow


class SafeBucket:
    """Attributes:
        main_grads: parameter -> the gradient of its main parameter.
        stepped: the parameters that this step has changed: graphs that have read others may live on.
        versions: autograd's counts of the writes into each parameter, to see later ones.
    """

    def move_in(self, flat_params):
        """Parameters in shared memory, one is enough, take all of their dtype there, and stay views of one storage."""
        if any(tensor.device.type == "cpu" and tensor.is_shared() for tensor in self.tensors):
            flat_params.share_memory_()  # and so every view of it: `partition` is called when all have moved in
        super().move_in(flat_params)

    def partition(self):
        flat = self.flat_params
        has_memory = type(flat) is torch.Tensor and not flat.is_meta  # a FakeTensor has none
        if has_memory and not (flat.device.type == "cpu" and flat.is_shared()):
            for tensor, view in zip(self.tensors, self.views):
                tensor.data = torch.from_dlpack(view)  # of the same memory, which it keeps alive
        super().partition()
        self.main_grads = {param: main.grad for param, main in self.main_params.items()}
        self.zero = self.flat_params.new_zeros(())
        self.stepped = self.params
        self.note_new_params()

    def grads(self):
        grads = super().grads()
        for index, grad in enumerate(grads):
            if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
                grads[index] = self.dense(grad, self.params[index], self.tensors[index])
        return grads

    def dense(self, grad, param, tensor):
        """A missing gradient is zero, without any memory."""
        return self.zero.expand_as(tensor) if grad is None else grad.to_dense()

    def note_new_params(self):
        """Tell autograd, which saw nothing, that these are new: a graph that has read the old ones is refused."""
        torch.autograd.graph.increment_version(self.stepped)
        self.versions = self.versions_now()

    def versions_now(self):
        return [param._version for param in self.params]

    def take_model_changes(self):
        """Where somebody has written into the parameters, main_shard follows."""
        if self.versions != self.versions_now():
            follow(self.parameter.main_shard, self.parameter.shard)

    def moved_params(self):
        """Those whose `data` somebody has replaced: they are no views of `flat_params` any more."""
        return [param for param, tensor, view in zip(self.params, self.tensors, self.views)
                if tensor.data_ptr() != view.data_ptr()]
