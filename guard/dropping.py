"""Lets model.zero_grad() drop gradients that aren't in `param.grad`: stage 4 sends them, stage 3 has `main_grad`.

Situation: the usual loop of a GAN calls netD.zero_grad(). The generator's backward pass has computed gradients of the
discriminator too, and stage 4 has sent these gradients by then. Without this file the discriminator's next step would
use them. A loop that gives a step up by model.zero_grad() needs the same. `param.grad = None` drops no gradient that
has left `param.grad`. Shown by tests/stages/test_lost_gradients.py.
"""

import functools

import torch

from .hooks import owners_of, untraced

TORCHS_ZERO_GRAD = torch.nn.Module.zero_grad


@untraced
@functools.wraps(TORCHS_ZERO_GRAD)
def zero_grad(module, set_to_none=True):
    """Do what torch's Module.zero_grad does, and tell the optimizers, or buffers, that have hooks on the parameters."""
    TORCHS_ZERO_GRAD(module, set_to_none)
    params_of = {}  # optimizer or buffer -> the parameters in the module that have its hook
    for param in module.parameters():
        for owner in owners_of(param):
            params_of.setdefault(owner, []).append(param)
    for owner, params in params_of.items():  # in the order of the module, as on the other ranks
        if hasattr(owner, "_drop_grads"):
            owner._drop_grads(params, set_to_none)


def gradient_lost(name):
    """Return the error for a gradient that model.zero_grad() should have dropped, and could not."""
    return RuntimeError(f"zero_grad() of a module couldn't drop the gradient of parameter {name} alone, it has left "
                        "with others: call optimizer.zero_grad()")
