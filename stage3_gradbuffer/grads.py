"""Handles code that bypasses the buffer of stage 3: model.zero_grad(), load_state_dict(), a frozen layer.

The buffer (buffer.py) holds all gradients of this rank until they are averaged. Then it holds this rank's *shard* of
the averages. The inner optimizer, torch's, steps *main parameters*: the ranges of parameters that lie in this rank's
shard, or fp32 copies of them if they have 16 bits. Their gradients are the *main gradients*. `param.main_grad`, an
attribute of a model's parameter, is something else: its whole gradient, in the buffer. It takes the place of
`param.grad` if gradients have another dtype than the parameter.

- A gradient that a program assigns to `param.grad` is averaged like any other.
- If a program loads parameters, the next step starts from the loaded parameters.
- A gradient that comes too late to be averaged is an error.

Shown by tests/stages/test_stages.py, `test_what_p_grad_holds_at_step_counts`, tests/stages/test_hostile.py and
tests/stages/test_dtypes.py.
"""

import torch

from guard.dropping import gradient_lost
from guard.groups import InnerTensors, name_of
from guard.hooks import hook_gradient
from guard.refuse import data_replaced
from guard.states import update_main_param

from .buffer import GradBuffer, Holds


class GuardedBuffer(GradBuffer):
    """A buffer that notices changes which other code makes to gradients and parameters.

    The core, which is the optimizer without checks, has the class GradBuffer. GradBuffer calls the methods that this
    class overrides.

    Attributes of GradBuffer:
        flat: the buffer, a flat tensor.
        holds: what is in the buffer: ZEROS, GRADS or GRAD_SHARD, for example.
        grads: for each parameter the view of the buffer for its gradient.
        main_params, main_grads: the main parameters of this rank, and the main gradients.
        ranges: for each main parameter a Range: `index` is the place of its parameter in `params`.
        grad_shard, main_grad_shard: this rank's shard of the gradients, and the same tensor or an fp32 copy of it.
        model_ranges(): for each of `ranges` a view of the model's parameter.

    Attributes beside these:
        index_of: id of a parameter -> its place in `params`.
        uses_param_main_grad: whether gradients have another dtype than parameters, so `param.main_grad` has them.
        given_grads: for each parameter the view of the buffer that `give` has set as `param.grad`, or None.
        received: indices of the parameters that received a gradient since the last step.
        lost: indices of the parameters whose averaged gradient `model.zero_grad()` should have dropped, and couldn't.
        param_views: for each parameter a view of its memory. They show whether a program has replaced `param.data`.
        versions: autograd's version counter of each parameter; a later write changes it.
        zero_version: the counter of `flat` when it was last zero.
        shard_version: the counter of `flat` when it last held the shard; None after a backward pass that was refused,
            which has added gradients to the shard.
    """

    def __init__(self, params, grad_dtype, process_group):
        self.uses_param_main_grad = grad_dtype != params[0].dtype
        # For guard/scaling.py: what torch's clipping would find in `param.grad`, this rank's own gradient or nothing.
        self._param_grad_holds = "nothing" if self.uses_param_main_grad else "own"
        self.index_of = {id(param): index for index, param in enumerate(params)}
        self.received = set()
        self.lost = set()
        self.given_grads = [None] * len(params)
        super().__init__(params, grad_dtype, process_group)  # calls `watch` and `attach` for each parameter
        self.zero_version = self.flat._version
        self.param_views = [param.detach() for param in params]
        self.versions = [param._version for param in params]

    def attach(self, param, grad):
        """Let autograd add to `grad`, a view of the buffer, if `param` is trained and has no gradient yet.

        `param.main_grad` is set in any case.
        """
        takes_grad = param.requires_grad and param.grad is None  # an existing gradient is kept, as in torch
        if takes_grad or self.uses_param_main_grad:
            super().attach(param, grad.detach())  # another view: a user may call its detach_(), or set its data

    def give(self, index):
        """Set `param.grad` to a view of the buffer, or to None: for a frozen or moved parameter, or with main_grad."""
        param = self.params[index]
        grad = None
        if param.requires_grad and not self.uses_param_main_grad and is_same(param, self.param_views[index]):
            grad = self.grads[index].detach()
        param.grad = grad
        self.given_grads[index] = grad

    def changed_grads(self):
        """Return indices of parameters whose `param.grad` isn't the view that `give` would set."""
        changed = []
        for index, (param, given, view) in enumerate(zip(self.params, self.given_grads, self.grads)):
            # The last comparison: a program may have set `data` of the view that was given.
            is_given = given is not None and param.grad is given and given.data_ptr() == view.data_ptr()
            # A gradient that requires grad has a graph. The parameter may have been frozen after `give`.
            if not is_given or given.requires_grad or not param.requires_grad:
                changed.append(index)
        return changed

    def _is_moved(self, param):
        """Return whether other code has replaced the parameter's data. guard/scaling.py calls this method, too.

        share_memory() isn't noticed, and needn't be: it moves the data and our view of it together.
        """
        return param.data_ptr() != self.param_views[self.index_of[id(param)]].data_ptr()

    def watch(self, param):
        """Let autograd call `take_grad` when it has made a gradient of `param`."""
        hook_gradient(param, self.take_grad, takes_gradient=True)  # the hook is removed when this buffer is gone

    def take_grad(self, param):
        """Note that `param` has received a gradient. If the gradient isn't in the buffer, copy it there."""
        index = self.index_of[id(param)]
        given = self.given_grads[index]
        if self.holds is Holds.GRADS and given is not None and param.grad is given:
            self.received.add(index)  # autograd has added to the view, so the gradient is in the buffer
        else:
            self.bring_grad(param, index)

    @torch.no_grad()  # backward(create_graph=True) calls hooks with gradients enabled
    def bring_grad(self, param, index):
        """Copy `param.grad` into the buffer, unless it is there already.

        At the end it calls GradBuffer.take_grad, which adds to `param.main_grad`, if that is used, and sets `holds`.
        """
        if self.holds not in (Holds.ZEROS, Holds.GRADS):
            self.shard_version = None  # `refuse_changes` raises an error then, in the next step
            raise RuntimeError(f"the buffer holds {self.holds.value}: call step() or the optimizer's zero_grad() "
                               "before backward()")
        self.received.add(index)
        if not self.uses_param_main_grad and not is_same(param.grad, self.grads[index]):
            # `param.grad` is no view of the buffer, because model.zero_grad() has set it to None before, for example.
            self.grads[index].copy_(param.grad.to_dense())  # nn.Embedding(sparse=True) makes sparse gradients
            # backward(create_graph=True) makes a gradient that requires grad. It stays, to be differentiated.
            if not param.grad.requires_grad:
                self.give(index)
        super().take_grad(param)

    def collect_grads(self):
        """Copy gradients that a user has assigned into the buffer. Clear the gradient where a user has set None.

        A frozen parameter may still have a view of the buffer in `param.grad`. `received` tells if it is a gradient.
        """
        for index in self.changed_grads():
            param = self.params[index]
            if param.grad is None and not self.uses_param_main_grad:
                self.grads[index].zero_()
                self.received.discard(index)
            elif param.grad is not None and not is_same(param.grad, self.grads[index]):
                self.bring_grad(param, index)
                self.give(index)  # even if the gradient has a graph, which the step no longer needs

    def reduce_scatter_grads(self):
        """Average the gradients, once per step.

        A frozen parameter isn't updated, unless it received a gradient in this step: the inner optimizer skips a main
        parameter without a gradient.
        """
        if self.holds not in (Holds.ZEROS, Holds.GRADS):
            return
        self.collect_grads()
        super().reduce_scatter_grads()
        self.shard_version = self.flat._version
        for r, main_param, main_grad in zip(self.ranges, self.main_params, self.main_grads):
            is_stepped = self.params[r.index].requires_grad or r.index in self.received
            main_param.grad = main_grad if is_stepped else None

    def _drop_grads(self, params, _):
        """Drop gradients that `model.zero_grad()` can't reach: gradients in `param.main_grad`, and averages.

        guard/dropping.py calls this method with the parameters of the module, and `set_to_none`, which isn't used.
        Averages can only be dropped all together. If `params` aren't all parameters that have averages, the gradients
        of `params` are noted as lost, and `refuse_changes` raises an error for them.
        """
        dropped = self.received & {self.index_of[id(param)] for param in params}
        if self.holds is Holds.GRADS and self.uses_param_main_grad:
            for index in dropped:
                self.grads[index].zero_()
            self.received -= dropped
        elif self.holds is Holds.GRAD_SHARD and dropped == self.received:
            self.zero()
        elif self.holds is Holds.GRAD_SHARD:
            self.lost |= dropped

    def refuse_changes(self, groups):
        """Refuse memory that was replaced, and gradients that come after the average. groups: for names in errors.

        After the average the buffer holds the shard. If the main gradients are views of the shard, a program may write
        into the shard. If they are copies, that is refused, because the inner optimizer would not see it.
        """
        is_late = self.holds not in (Holds.ZEROS, Holds.GRADS)
        if is_late and self.shard_version is None:
            raise RuntimeError("a backward pass after finish_grad_sync() was refused: call the optimizer's zero_grad()")
        has_copies = self.main_grad_shard is not self.grad_shard
        if is_late and has_copies and self.flat._version != self.shard_version:
            raise RuntimeError("16-bit gradients were changed after finish_grad_sync(), by clip_grad_value_() say: "
                               "too late")
        for index in self.lost:  # the first raises the error
            raise gradient_lost(name_of(self.params[index], groups))
        for param, grad in zip(self.params, self.grads):
            if self._is_moved(param):
                raise data_replaced(name_of(param, groups))
            if self.uses_param_main_grad and not is_same(getattr(param, "main_grad", None), grad):
                raise RuntimeError(f"main_grad of parameter {name_of(param, groups)} was replaced, or a later optimizer"
                                   " has the gradients: write into it with copy_(), or build this one anew")
            if is_late and param.grad is not None and not is_same(param.grad, grad):
                raise RuntimeError(f"the gradient of parameter {name_of(param, groups)} was assigned after "
                                   "finish_grad_sync(): too late")

    def make_main_tensors(self):
        """Make main parameters and main gradients as the core does, and note their memory."""
        super().make_main_tensors()
        self.inner_tensors = InnerTensors(self.main_params)

    def take_main_params(self):
        """Copy main parameters into the shard as the core does, even if their `data` was replaced in the inner step."""
        self.inner_tensors.take_back()
        super().take_main_params()

    def copy_params_to_model(self):
        """Copy as the core does, and note the parameters' versions, because this change is our own."""
        super().copy_params_to_model()
        self.versions = [param._version for param in self.params]

    def take_model_changes(self):
        """Update `main_params` if a program, or load_state_dict(), has written into the model's parameters."""
        if self.versions != [param._version for param in self.params]:
            for model_range, main_param in zip(self.model_ranges(), self.main_params):
                update_main_param(main_param, model_range)

    def zero(self):
        """Zero the gradients as the core does, empty `received` and `lost`, and set `param.grad` to the views again."""
        if self.flat._version != self.zero_version:  # if they are equal, `flat` is zero already
            super().zero()
            self.zero_version = self.flat._version
        self.received.clear()
        self.lost.clear()
        for index in self.changed_grads():
            self.give(index)

    def let_go(self):
        """Remove from the parameters the gradients that are views of this buffer."""
        for param, grad in zip(self.params, self.grads):
            if is_same(param.grad, grad):
                param.grad = None
            vars(param).pop("main_grad", None)


def is_same(other, view):
    """Return whether `other`, a tensor or None, is a view of the memory of `view`, in the same shape and strides."""
    return other is not None and other.layout == view.layout and other.device == view.device and other.is_set_to(view)
