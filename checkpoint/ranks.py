"""What the ranks of a process group tell each other: one error on all of them, and not a hang."""

import torch.distributed as dist


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
