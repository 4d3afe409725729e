"""Who writes gradients or parameters past the buffer: model.zero_grad(), load_state_dict(), a frozen layer.

Gradients that were assigned count, parameters that were loaded are what is stepped next, and what comes too late to be
averaged is an error. Shown by tests/stages/test_stages.py, `test_what_p_grad_holds_at_step_counts`,
tests/stages/test_hostile.py and tests/stages/test_dtypes.py.
"""

import torch

from guard.groups import name_of
from guard.hooks import hook_gradient
from guard.refuse import data_replaced
from guard.states import follow

from .buffer import GradBuffer, Holds


class GuardedBuffer(GradBuffer):
    """Attributes:
        given: what each parameter got for its gradient. While that is there, as it was, there is nothing to do.
        received: indices of the parameters whose gradient has come since the last step.
        versions, zero_version, shard_version: autograd's counts of the writes into each parameter, and into `flat` when
            it was zero, and when it held the shard: to see later ones, by whomever.
    """

    def __init__(self, params, grad_dtype, process_group):
        self.in_main_grad = grad_dtype != params[0].dtype
        self._param_grad_holds = "nothing" if self.in_main_grad else "own"
        self.index_of = {id(param): index for index, param in enumerate(params)}
        self.received, self.hooks, self.given = set(), [], [None] * len(params)
        super().__init__(params, grad_dtype, process_group)
        self.zero_version = self.flat._version
        self.param_views = [param.detach() for param in params]  # share_memory() moves these along, and nothing else
        self.note_new_params()

    def attach(self, param, grad):
        if self.in_main_grad or param.requires_grad and param.grad is None:  # one that is there counts, as in torch
            super().attach(param, grad.detach())  # not the view itself: a user may detach_() it, or set its data

    def give(self, index):
        """A view of the buffer to a parameter for a gradient; none if it is frozen, has a main_grad, or other data."""
        param, grad = self.params[index], None
        if param.requires_grad and not self.in_main_grad and is_same(param, self.param_views[index]):
            grad = self.grads[index].detach()
        param.grad = self.given[index] = grad

    def changed_grads(self):
        """-> indices of the parameters that have another gradient than they were given, or may have none."""
        return [index for index, (param, given, view) in enumerate(zip(self.params, self.given, self.grads))
                if param.grad is not given or given is None or given.requires_grad or not param.requires_grad
                or given.data_ptr() != view.data_ptr()]

    def watch(self, param):
        self.hooks.append(hook_gradient(param, self.take_grad, takes=True))

    def take_grad(self, param):
        index = self.index_of[id(param)]
        if self.holds is Holds.GRADS and self.given[index] is not None and param.grad is self.given[index]:
            self.received.add(index)  # autograd has added to the view, and an earlier one has said that there are GRADS
        else:
            self.bring_grad(param, index)

    @torch.no_grad()  # backward(create_graph=True) calls hooks with gradients on
    def bring_grad(self, param, index):
        """Bring a gradient into the buffer, wherever autograd or the user has put it."""
        if self.holds not in (Holds.ZEROS, Holds.GRADS):
            self.shard_version = None  # autograd has added to the view already
            raise RuntimeError(f"the buffer holds {self.holds.value}: call step() or the optimizer's zero_grad() "
                               "before backward()")
        if param.grad is None:  # an earlier hook has taken it
            return
        self.received.add(index)
        if not self.in_main_grad and not is_same(param.grad, self.grads[index]):  # after model.zero_grad(), say
            self.grads[index].copy_(param.grad.to_dense())  # nn.Embedding(sparse=True) makes sparse ones
            # If it requires grad, backward(create_graph=True) made it, to be differentiated.
            if not param.grad.requires_grad and is_same(param, self.param_views[index]):
                self.give(index)
        super().take_grad(param)

    def collect_grads(self):
        """Whatever happened to `param.grad` outside of backward counts too.

        But the view that a parameter had when it was frozen is no gradient, unless backward has put one there.
        """
        for index in self.changed_grads():
            param = self.params[index]
            if param.grad is None and not self.in_main_grad:
                self.grads[index].zero_()  # set to None by the user
                self.received.discard(index)
            elif param.grad is not None and not is_same(param.grad, self.grads[index]):
                self.bring_grad(param, index)
                self.give(index)  # its graph, if it has one, has been used

    def reduce_scatter_grads(self):
        """Once between two steps. Frozen parameters are not stepped, unless they had a gradient before."""
        if self.holds not in (Holds.ZEROS, Holds.GRADS):
            return
        self.collect_grads()
        super().reduce_scatter_grads()
        self.shard_version = self.flat._version
        for r, main_param, main_grad in zip(self.ranges, self.main_params, self.main_grads):
            frozen = not self.params[r.index].requires_grad and r.index not in self.received
            main_param.grad = None if frozen else main_grad

    def refuse_new_grads(self, groups):
        """While the buffer holds a shard: what is assigned to `param.grad` now can't be averaged any more.

        What is written into it counts where main gradients are views of the buffer. Where they are copies it wouldn't.
        """
        if self.holds in (Holds.ZEROS, Holds.GRADS):
            return
        if self.shard_version is None:
            raise RuntimeError("a backward pass after finish_grad_sync() was refused: call the optimizer's zero_grad()")
        if self.main_grad_shard is not self.grad_shard and self.flat._version != self.shard_version:
            raise RuntimeError("16-bit gradients were changed after finish_grad_sync(), by clip_grad_value_() say: "
                               "too late")
        for param, grad in zip(self.params, self.grads):
            if param.grad is not None and not is_same(param.grad, grad):
                name = name_of(param, groups)
                raise RuntimeError(f"the gradient of parameter {name} was assigned after finish_grad_sync(): too late")

    def refuse_new_data(self, groups):
        """Refuse a parameter whose `data` somebody has replaced, or whose `main_grad`: we use the memory before."""
        for param, view, grad in zip(self.params, self.param_views, self.grads):
            if param.data_ptr() != view.data_ptr():
                raise data_replaced(name_of(param, groups))
            if self.in_main_grad and not is_same(getattr(param, "main_grad", None), grad):
                name = name_of(param, groups)
                raise RuntimeError(f"main_grad of parameter {name} was replaced, or a later optimizer has the "
                                   "gradients: write into it with copy_(), or build this one anew")

    def copy_params_to_model(self):
        super().copy_params_to_model()
        self.note_new_params()

    def note_new_params(self):
        self.versions = [param._version for param in self.params]

    def take_model_changes(self):
        """Where somebody has written into the parameters since, model.load_state_dict() say, main_params follow."""
        if self.versions != [param._version for param in self.params]:
            for now, main_param in zip(self.model_ranges(), self.main_params):
                follow(main_param, now)

    def zero(self):
        if self.flat._version != self.zero_version:  # else it is zero already
            super().zero()
            self.zero_version = self.flat._version
        self.received.clear()
        for index in self.changed_grads():
            self.give(index)

    def let_go(self):
        """Hand the parameters back to torch: gradients stay where autograd, or the user, puts them."""
        for hook in self.hooks:
            hook.remove()
        for param, grad in zip(self.params, self.grads):
            if is_same(param.grad, grad):
                param.grad = None
            vars(param).pop("main_grad", None)


def is_same(one, view):
    """Whether it is the same view of the same memory; None is not."""
    return one is not None and one.layout == view.layout and one.device == view.device and one.is_set_to(view)
