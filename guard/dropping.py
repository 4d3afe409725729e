"""Lets model.zero_grad() drop the gradients that have left `param.grad`: sent by stage 4, or in stage 3's `main_grad`.

Situation: the usual loop of a GAN calls netD.zero_grad(). The generator's backward pass has computed gradients of the
discriminator too, and stage 4 has sent them by then: they would count in the discriminator's next step. A loop that
drops a step by model.zero_grad() is the same. Nothing notices `param.grad = None`. Shown by
tests/stages/test_lost_gradients.py.
"""

import functools

import torch

from .hooks import owners_of, untraced

TORCHS_ZERO_GRAD = torch.nn.Module.zero_grad


@untraced
@functools.wraps(TORCHS_ZERO_GRAD)
def zero_grad(module, set_to_none=True):
    TORCHS_ZERO_GRAD(module, set_to_none)
    params_of = {}  # owner of our hook -> its parameters in the module
    for param in module.parameters():
        for owner in owners_of(param):
            params_of.setdefault(owner, []).append(param)
    for owner, params in params_of.items():  # in the order of the module, as on the other ranks
        if hasattr(owner, "_drop_grads"):
            owner._drop_grads(params, set_to_none)


def lost(name):
    """Return the error for a gradient that model.zero_grad() should have dropped, and could not."""
    return RuntimeError(f"zero_grad() of a module couldn't drop the gradient of parameter {name} alone, it has left "
                        "with others: call optimizer.zero_grad()")
