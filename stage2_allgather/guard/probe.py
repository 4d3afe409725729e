"""For whoever brings an optimizer that steps tensors together, as L-BFGS does: those of a rank would step differently.

Found out by a trial on small tensors, before anything is changed. Shown by tests/test_stages.py.
"""

import inspect

import torch

from ..optimizer import hyperparameters


def check_divisible(make_optimizer, groups):
    """Refuse an optimizer that steps tensors together otherwise than each by itself: try it, for each group, on two.

    Args:
        make_optimizer: function of parameter groups.

    Raises:
        ValueError: the results differ; or whatever torch raises where its arguments are wrong.
    """
    name, device = make_optimizer.func.__name__, groups[0]["params"][0].device
    make_optimizer([torch.zeros(8, 8, device=device)])  # wrong arguments are reported as torch does
    lr = {"lr": 0.1} if "lr" in inspect.signature(make_optimizer).parameters else {}  # so that there is a difference
    different = [{**hyperparameters(group), **lr} for group in groups]
    for options in {repr(options): options for options in different}.values():
        try:
            together, apart = step_together_and_apart(lambda params: make_optimizer([{**options, "params": params}]),
                                                      device)
            alike, reason = torch.allclose(together, apart, rtol=1e-12, atol=0), None
        except (AttributeError, RuntimeError, TypeError, ValueError) as failure:
            alike, reason = False, failure  # Muon wants matrices, L-BFGS a closure, some a gradient for every tensor
        if not alike:
            raise ValueError(f"{name} doesn't step tensors one by one: a rank's would step differently") from reason


def step_together_and_apart(make, device):
    """-> what becomes of two (8, 8) tensors in three steps: with one optimizer, and with one each; (2, 8, 8) each."""
    before = torch.linspace(-1, 1, 128, dtype=torch.float64, device=device).view(2, 8, 8)
    together, apart = list(before.clone()), list(before.clone())
    optimizers = [make(together), *(make([param]) for param in apart)]
    for step in range(3):
        grads = torch.sin(before * 5 + step)
        for params in (together, apart):
            for param, grad in zip(params, grads.clone()):  # SGD with nesterov writes into gradients
                param.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    return torch.stack(together), torch.stack(apart)
