"""Clipping by torch.nn.utils, as Trainer, accelerate, Lightning and many a loop do: an error, and the remedy.

On one rank torch finds in `param.grad` this rank's own gradient, before it is averaged, or none: it would clip by
another norm on each rank, or nothing at all. Afterwards nothing can notice that, so the two functions of torch refuse
parameters of ours themselves. Shown by tests/stages/test_users.py,
`test_torchs_clipping_is_refused`.
"""

import functools

import torch


def refusing(clip):
    """-> `clip`, a function of torch.nn.utils, which refuses gradients that it can't see whole.

    The owner of a hook of ours says what `param.grad` holds: "averages"; "own", of this rank; or "nothing".
    """
    @functools.wraps(clip)
    def clip_or_refuse(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for param in parameters:
            holds = {getattr(getattr(hook, "owner", type(None))(), "_param_grad_holds", None)
                     for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()}
            finds_none = "nothing" in holds and param.grad is None and param.requires_grad
            finds_own = holds & {"own", "nothing"} and param.grad is not None and clip.__name__ == "clip_grad_norm_"
            if finds_none or finds_own:
                what = "no gradient" if finds_none else "this rank's own gradient, not the average,"
                raise RuntimeError(f"torch.nn.utils.{clip.__name__}() finds {what} in param.grad: call "
                                   "clip_grad_norm_(max_norm) of the DistributedOptimizer")
        return clip(parameters, *args, **kwargs)

    clip_or_refuse.is_watched = True
    return clip_or_refuse


def watch_torchs_clipping():
    """When the first optimizer is built: from then on the functions of torch ask whose gradients they are given."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = getattr(torch.nn.utils, name)
        if not hasattr(clip, "is_watched"):
            setattr(torch.nn.utils, name, refusing(clip))
