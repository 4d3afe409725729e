"""What the ranks of a process group tell each other: one error on all of them, and not a hang."""

import contextlib

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, or not be loaded here: one line that says why, on every rank."""


def rank_and_size(group) -> tuple[int, int]:
    """Without a process group a program is rank 0 of 1."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def all_gather(what, group) -> list:
    """-> `what` of each rank, in rank order. Collective; an object that pickle can send."""
    everyone = [what]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, what, group=group)
    return everyone


def agree(error, what, group):
    """Raise a CheckpointError on every rank if one of them has an `error`, a line of text. Collective."""
    errors = all_gather(error, group)
    for rank, theirs in enumerate(errors):
        if theirs:
            raise CheckpointError(f"{what}: " + (theirs if len(set(errors)) == 1 else f"rank {rank}: {theirs}"))


def rank_in(group):
    rank, world_size = rank_and_size(group)
    if rank < 0:
        raise CheckpointError("this rank is in no process group since reshard(): the others save, and load")
    return rank, world_size


@contextlib.contextmanager
def errors_on_all(what, group):
    """Whatever goes wrong inside, on some rank, is a CheckpointError on all. Collective."""
    error = None
    try:
        yield
    except Exception as refusal:  # whatever an optimizer says of its hyperparameters, say, or too little memory
        error = first_line(refusal)
    agree(error, what, group)


def first_line(error):
    if isinstance(error, dcp.api.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
