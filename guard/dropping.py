"""Lets model.zero_grad() drop gradients that are no longer in `param.grad`.

Such gradients exist in two of the four versions ("stages") of the optimizer: stage 3 may keep gradients in
`param.main_grad`, and stage 4 sends gradients to other ranks during the backward pass. guard/scaling.py puts the
function `zero_grad` of this file in the place of torch.nn.Module.zero_grad while a DistributedOptimizer exists.

Situation: the usual loop of a GAN calls netD.zero_grad(). The generator's backward pass has computed gradients of the
discriminator too, and stage 4 has already sent these gradients. Without this file the discriminator's next step would
use them. A loop that calls model.zero_grad() to skip a step has the same problem.

Nothing notices an assignment `param.grad = None`, so a gradient that has left `param.grad` then stays. Shown by
tests/stages/test_lost_gradients.py.
"""

import functools

import torch

from .hooks import owners_of, untraced

TORCHS_ZERO_GRAD = torch.nn.Module.zero_grad


@untraced  # torch.compile doesn't compile this function
@functools.wraps(TORCHS_ZERO_GRAD)
def zero_grad(module, set_to_none=True):
    """Do what torch's Module.zero_grad does, and tell the owners of the parameters that their gradients are dropped.

    An owner is an optimizer, or its buffer, that has a gradient hook on a parameter. The owner's method `_drop_grads`
    then drops the gradients that it keeps elsewhere. An owner that no longer exists is None here, without this method.
    """
    TORCHS_ZERO_GRAD(module, set_to_none)
    params_of = {}  # owner -> the parameters of the module that have its hook
    for param in module.parameters():
        for owner in owners_of(param):
            params_of.setdefault(owner, []).append(param)
    # In the order of the parameters, so in the same order on all ranks, because `_drop_grads` may send messages.
    for owner, params in params_of.items():
        if hasattr(owner, "_drop_grads"):
            owner._drop_grads(params, set_to_none)


def gradient_lost(name):
    """Return the error for a gradient that model.zero_grad() should have dropped, and could not. Stage 4 raises it.

    name: name of the parameter.
    """
    return RuntimeError(f"zero_grad() of a module couldn't drop the gradient of parameter {name} alone, it has left "
                        "with others: call optimizer.zero_grad()")
