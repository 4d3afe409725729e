"""The torch optimizer that a stage wraps: how it is made, and whether it may step parts of what it was made for.

The same file stands in every stage.
"""

import functools
import inspect

import torch


def optimizer_factory(optimizer_cls, param, kwargs):
    """`optimizer_cls` with `kwargs`, fused where torch can do that for tensors like `param` and `kwargs` don't say."""
    plain = functools.partial(optimizer_cls, **kwargs)
    ways = {"fused", "foreach", "capturable", "differentiable"}
    accepted = inspect.signature(optimizer_cls).parameters
    if "fused" not in accepted or ways & kwargs.keys():
        return plain
    if "momentum" in accepted:  # torch's fused SGD can't step a parameter whose first gradient comes later than others
        return plain
    fused = functools.partial(plain, fused=True)
    try:
        fused([torch.empty_like(param)])
    except RuntimeError:  # no fused kernel for this device or dtype
        return plain
    return fused


def check_divisible(optimizer_cls, device, kwargs, elementwise):
    """Refuse an optimizer that steps parts otherwise than the whole: try it on two small tensors.

    Args:
        elementwise: whether the parts are pieces of tensors, as in stages 3 and 4, or tensors, as in 1 and 2.

    Raises:
        ValueError: the results differ; or whatever torch raises where `kwargs` are wrong.
    """
    if "lr" in inspect.signature(optimizer_cls).parameters:
        kwargs = {**kwargs, "lr": 0.1}  # so that there is a difference to see
    optimizer_cls([torch.zeros(8, 8, device=device)], **kwargs)  # wrong arguments are reported as torch does

    def cut(tensor):
        return list(tensor.flatten().split([13, 51, 64])) if elementwise else list(tensor)

    values = torch.linspace(-1, 1, 128, dtype=torch.float64, device=device).view(2, 8, 8)
    whole, parts = list(values.clone()), cut(values.clone())
    try:
        optimizers = [optimizer_cls(params, **kwargs) for params in (whole, *([part] for part in parts))]
        for step in range(3):
            grads = torch.sin(values * 5 + step)
            for param, grad in zip(whole + parts, [*grads, *cut(grads.clone())]):
                param.grad = grad
            for optimizer in optimizers:
                optimizer.step()
        whole, parts = (torch.cat([param.flatten() for param in params]) for params in (whole, parts))
        alike = torch.allclose(whole, parts, rtol=1e-12, atol=0)
    except (RuntimeError, TypeError, ValueError):  # Muon wants matrices, L-BFGS a closure, SparseAdam sparse gradients
        alike = False
    if not alike and elementwise:
        raise ValueError(f"{optimizer_cls.__name__} is not element-wise: shards would step differently; use stage 2")
    if not alike:
        raise ValueError(f"{optimizer_cls.__name__} doesn't step tensors one by one: a rank's would step differently")


def hyperparameters(group):
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
