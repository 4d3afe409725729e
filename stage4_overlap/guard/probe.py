"""For whoever brings an optimizer that is not element-wise, such as Lamb or Muon: a shard would step differently.

Found out by a trial on small tensors, before anything is changed. The same file stands in stages 3 and 4. Shown by
tests/test_stages.py, `test_optimizers_that_are_not_elementwise_are_refused`.
"""

import inspect

import torch

from ..optimizer import hyperparameters


def check_elementwise(make_optimizer, groups):
    """Refuse an optimizer that steps pieces of tensors otherwise than the whole: try it, for each group, on two.

    Args:
        make_optimizer: function of parameter groups.

    Raises:
        ValueError: the results differ, or tensors with requires_grad=False, as shards are, aren't stepped; or whatever
            torch raises where its arguments are wrong.
    """
    name, device = make_optimizer.func.__name__, groups[0]["params"][0].device
    make_optimizer([torch.zeros(8, 8, device=device)])  # wrong arguments are reported as torch does
    lr = {"lr": 0.1} if "lr" in inspect.signature(make_optimizer).parameters else {}  # so that there is a difference
    different = [{**hyperparameters(group), **lr} for group in groups]
    for options in {repr(options): options for options in different}.values():
        try:
            before, whole, pieces = step_whole_and_in_pieces(
                lambda params: make_optimizer([{**options, "params": params}]), device
            )
            alike, reason = torch.allclose(whole, pieces, rtol=1e-12, atol=0), None
        except (AttributeError, RuntimeError, TypeError, ValueError) as failure:
            alike, reason = False, failure  # Muon wants matrices, L-BFGS a closure, some a gradient for every tensor
        if not alike:
            raise ValueError(f"{name} is not element-wise: in shards it would step otherwise; see stage 2") from reason
        if torch.equal(before, whole):
            raise ValueError(f"{name} doesn't step tensors with requires_grad=False, as shards are; use stage 2")


def step_whole_and_in_pieces(make, device):
    """-> the values of two (8, 8) tensors: before, after three steps as they are, after three in pieces; (128,) each.

    The pieces are stepped one after the other, each by a call of its own.
    """
    def cut(tensor):
        return list(tensor.flatten().split([13, 51, 64]))

    before = torch.linspace(-1, 1, 128, dtype=torch.float64, device=device).view(2, 8, 8)
    whole, pieces = list(before.clone()), cut(before.clone())
    of_whole, of_pieces = make(whole), make(pieces)
    for step in range(3):
        grads = torch.sin(before * 5 + step)
        grads_of_pieces = cut(grads.clone())  # now: SGD with nesterov writes into gradients
        for param, grad in zip(whole, grads):
            param.grad = grad
        of_whole.step()
        for piece, grad in zip(pieces, grads_of_pieces):
            piece.grad = grad
            of_pieces.step()
            piece.grad = None
    return before.flatten(), *(torch.cat([param.flatten() for param in params]) for params in (whole, pieces))
