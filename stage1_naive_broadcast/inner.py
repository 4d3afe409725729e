"""What it takes to wrap a torch optimizer: to make it, to refuse one that can't step parts, to pass on what is written.

The same file stands in every stage.
"""

import functools
import inspect
import weakref

import torch
import torch.distributed as dist

from .checks import all_params, spread_over


class OptimizerWrapper(torch.optim.Optimizer):
    """What a stage has to do because it wraps another optimizer. None of it is the idea of a stage.

    Attributes, which the stage sets, and a method that it has:
        optimizer: the inner one, which steps what this rank owns, in groups like ours.
        make_optimizer: what `optimizer_factory` returned.
        process_group, world_size: the ranks that share the work, and how many they are.
        finish_grad_sync(): average the gradients; idempotent.
    """

    _step_supports_amp_scaling = True  # GradScaler then calls step() on every rank, whatever it finds on this one

    @property
    def state(self):
        """That of the inner optimizer: what this rank steps, and no more."""
        return self.optimizer.state

    @state.setter
    def state(self, state):
        self.optimizer.state = state

    def pieces(self):
        """-> [(param, start, stop, main), ...]: what this rank steps, as checkpoint/ asks for it."""
        return [(param, 0, param.numel(), param) for param in all_params(self.optimizer)]

    def __getstate__(self):
        raise TypeError("DistributedOptimizer can't be copied or pickled, it is one part of d: use state_dict()")

    def _closure_loss(self, closure):
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            return None
        if hasattr(loss, "full_tensor"):  # a DTensor, maybe of partial sums
            loss = loss.full_tensor()
        loss = torch.as_tensor(loss, device=self.param_groups[0]["params"][0].device).detach().clone()
        dist.all_reduce(loss, group=self.process_group)
        return loss / self.world_size

    def _add_to_inner(self, group, params):
        """Give the inner optimizer a group like `group`, with `params`: this rank's part of it."""
        added = self.make_optimizer([{**hyperparameters(group), "params": params}])
        self.optimizer.param_groups += added.param_groups
        self.optimizer.state.update(added.state)  # before torch 2.13 Adagrad makes its state in the constructor only

    def _inner_state_dict(self):
        """That of the inner optimizer, with the hyperparameters that our groups have."""
        self.pass_on_hyperparameters()
        stepped = {id(param) for param in all_params(self.optimizer)}
        for param, state in list(self.optimizer.state.items()):
            if not isinstance(param, torch.Tensor):
                continue  # what has a name for a key torch saves as it is
            if not state:
                del self.optimizer.state[param]  # made by torch for somebody who looked; maybe another rank steps it
            elif id(param) not in stepped:
                shape = tuple(param.shape)
                raise ValueError(f"optimizer.state has a tensor of shape {shape}, which isn't stepped here: remove it")
        return self.optimizer.state_dict()

    def pass_on_hyperparameters(self):
        """Learning-rate schedulers write into our groups: the inner optimizer must see it."""
        for group, inner in zip(self.param_groups, self.optimizer.param_groups):
            inner.update(hyperparameters(group))

    def _take_back_hyperparameters(self):
        """And what the inner optimizer has written into its own: some count steps there."""
        for group, inner in zip(self.param_groups, self.optimizer.param_groups):
            group.update(hyperparameters(inner))

    def _found_inf(self, grad_scaler, elsewhere=False):
        """Unscale the gradients that this rank steps. -> whether any rank found an inf or nan in its own.

        `elsewhere`: whether there are gradients that are not in `param.grad`, where GradScaler.unscale_() looks.
        """
        if grad_scaler is None:
            return False
        self.finish_grad_sync()  # in stage 4 some may be under way
        state, scale = grad_scaler._per_optimizer_states[id(self)], grad_scaler._get_scale_async()
        unscaled = state["stage"] is torch.amp.grad_scaler.OptState.UNSCALED
        if unscaled and elsewhere:
            raise RuntimeError(
                "GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()"
            )
        grads = [param.grad for param in all_params(self.optimizer) if param.grad is not None]
        found_inf = torch.zeros_like(scale)
        for found in state["found_inf_per_device"].values():  # by unscale_(): gradients may have been mended since
            found_inf += found.to(found_inf.device)
        if grads:
            factor = torch.ones_like(scale) if unscaled else scale.double().reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
        tensor_parallel = dict.fromkeys(group for param in all_params(self) for group in spread_over(param))
        for group in (self.process_group, *tensor_parallel):
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
        state["found_inf_per_device"] = {found_inf.device: found_inf}  # where GradScaler.update() looks
        return found_inf.item() > 0


def optimizer_factory(optimizer_cls, param, kwargs):
    """`optimizer_cls` with `kwargs`, fused where torch can do that for tensors like `param` and `kwargs` don't say."""
    plain = functools.partial(optimizer_cls, **kwargs)
    ways = {"fused", "foreach", "capturable", "differentiable"}
    accepted = inspect.signature(optimizer_cls).parameters
    # torch's fused SGD, which has a momentum, can't step a parameter whose first gradient comes later than others.
    if "fused" not in accepted or "momentum" in accepted or ways & kwargs.keys():
        return plain
    fused, probe = functools.partial(plain, fused=True), torch.zeros(1, dtype=param.dtype, device=param.device)
    probe.grad = torch.zeros_like(probe)
    try:
        fused([probe]).step()  # before torch 2.13 Adagrad's constructor doesn't know that CUDA has no such kernel
    except RuntimeError:  # no fused kernel for this device or dtype
        return plain
    return fused


def check_divisible(make_optimizer, groups, elementwise):
    """Refuse an optimizer that steps parts otherwise than the whole: try it, for each group, on two small tensors.

    Args:
        make_optimizer: what `optimizer_factory` returned.
        elementwise: whether the parts are pieces of tensors, as in stages 3 and 4, stepped one after the other, as in
            stage 4. Otherwise they are tensors, each of them another rank's.

    Raises:
        ValueError: the results differ, or tensors with requires_grad=False, as shards are, aren't stepped; or whatever
            torch raises where its arguments are wrong.
    """
    name, device = make_optimizer.func.__name__, groups[0]["params"][0].device
    make_optimizer([torch.zeros(8, 8, device=device)])  # wrong arguments are reported as torch does
    lr = {"lr": 0.1} if "lr" in inspect.signature(make_optimizer).parameters else {}  # so that there is a difference
    different = [{**hyperparameters(group), **lr} for group in groups]
    for options in {repr(options): options for options in different}.values():
        def make(params):
            return make_optimizer([{**options, "params": params}])
        try:
            before, whole, parts = step_whole_and_in_parts(make, elementwise, device)
            alike, reason = torch.allclose(whole, parts, rtol=1e-12, atol=0), None
        except (AttributeError, RuntimeError, TypeError, ValueError) as failure:
            alike, reason = False, failure  # Muon wants matrices, L-BFGS a closure, some a gradient for every tensor
        if not alike and elementwise:
            raise ValueError(f"{name} is not element-wise: in shards it would step otherwise; see stage 2") from reason
        if not alike:
            raise ValueError(f"{name} doesn't step tensors one by one: a rank's would step differently") from reason
        if elementwise and torch.equal(before, whole):
            raise ValueError(f"{name} doesn't step tensors with requires_grad=False, as shards are; use stage 2")


def step_whole_and_in_parts(make, elementwise, device):
    """-> the values of two small tensors: before, after three steps as they are, after three in parts; (128,) each."""
    def cut(tensor):
        return list(tensor.flatten().split([13, 51, 64])) if elementwise else list(tensor)

    before = torch.linspace(-1, 1, 128, dtype=torch.float64, device=device).view(2, 8, 8)
    whole, parts = list(before.clone()), cut(before.clone())
    together, apart = make(whole), [make(parts)] * 3 if elementwise else [make([part]) for part in parts]
    for step in range(3):
        grads = torch.sin(before * 5 + step)
        pieces = cut(grads.clone())  # now: SGD with nesterov writes into gradients
        for param, grad in zip(whole, grads):
            param.grad = grad
        together.step()
        for optimizer, part, grad in zip(apart, parts, pieces):
            part.grad = grad
            optimizer.step()
            part.grad = None
    return before.flatten(), *(torch.cat([param.flatten() for param in params]) for params in (whole, parts))


def hyperparameters(group):
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def hook_gradient(param, method, takes=False):
    """Have `method`, of an optimizer or of its buffer, called when the gradient of `param` is complete. -> handle

    It holds that object weakly: parameters don't keep alive what they were trained with. A frozen parameter has the
    hook too: it may be unfrozen later. `takes`: `method` takes the gradient out of `param.grad`. The hook of an
    earlier optimizer that does so, of any stage, is removed, or this one would find none.
    """
    # Not by weakref.WeakMethod, which prints an error for each parameter as Python ends.
    weak_owner, function = weakref.ref(method.__self__, lambda _: handle.remove()), method.__func__

    @torch.compiler.disable  # where a compiled function calls backward()
    def hook(param):
        owner = weak_owner()
        if owner is not None:
            function(owner, param)

    hook.takes_gradient = takes
    hooks = param._post_accumulate_grad_hooks or {}
    for key in list(hooks):
        if takes_gradient(hooks.get(key)):  # an earlier optimizer that nobody has takes its own off, at any moment
            hooks.pop(key, None)
    vars(param).pop("main_grad", None)  # where stage 3 may have taken it
    requires_grad = param.requires_grad
    handle = param.requires_grad_().register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


def takes_gradient(hook):
    return getattr(hook, "takes_gradient", False) is True  # a Mock, as a hook, has whatever is asked for


def has_later_hooks(param):
    """Whether somebody's hooks, registered later, are called after the one that takes the gradient."""
    return not takes_gradient(next(reversed(param._post_accumulate_grad_hooks.values())))
