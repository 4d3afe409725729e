"""For whoever has a scheduler that sets an lr on each rank by itself, as ReduceLROnPlateau does with a rank's loss.

Ranks that step with other settings mix two trainings without a word. So a checksum of the groups travels with a message
of the step; the values themselves only where checksums differ. What the inner optimizer has written into its groups is
compared in the step that follows. The same file stands in every stage. Shown by tests/stages/test_users.py,
`test_settings_that_differ_between_ranks_are_an_error_on_every_rank`.
"""

import math
import numbers
import zlib

import torch
import torch.distributed as dist

from ..optimizer import hyperparameters

N_FLAGS = 32


def settings_of(optimizer):
    """-> name -> value: what is plain in the parameter groups. Tensors on a GPU would have to be waited for."""
    return {f"{key} of group {g}": plain(value)
            for g, group in enumerate(optimizer.param_groups) for key, value in hyperparameters(group).items()}


def plain(value):
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, numbers.Real):
        return float(value)
    return value if isinstance(value, str) else None


def checksum_of(settings):
    """-> 31 bits; of floats what CPUs agree on, whose cosines may differ in the last bit."""
    return zlib.crc32(repr([rounded(value) for value in settings.values()]).encode()) >> 1


def rounded(value):
    if isinstance(value, tuple):
        return tuple(map(rounded, value))
    return f"{value:.9g}" if isinstance(value, float) else value


def flags_of(checksum):
    """-> N_FLAGS of 0 and 1, which can be added up: bits of `checksum`, and then the opposite of each."""
    bits = [checksum >> i & 1 for i in range(N_FLAGS // 2)]
    return bits + [1 - bit for bit in bits]


def sums_differ(flags):
    """Whether the flags of all ranks, added up or averaged, were those of different checksums.

    A process that plays one of d ranks may gather what is no flags: of these each bit or its opposite is set, and some
    bits are alike.
    """
    half = N_FLAGS // 2
    pairs = list(zip(flags[:half], flags[half:]))
    are_flags = min(flags) == 0 and all(map(any, pairs))
    return are_flags and any(map(all, pairs))


def difference_between_ranks(settings, process_group):
    """Called on every rank, where checksums differ. Collective. -> a message, or None if it is by rounding only."""
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, settings, group=process_group)
    for rank, theirs in enumerate(everyone):
        for name in everyone[0] | theirs:
            one, other = everyone[0].get(name), theirs.get(name)
            if not alike(one, other):
                return (f"{name} is {one} on rank 0 and {other} on rank {rank}: set the same on every rank (feed "
                        "ReduceLROnPlateau with the average of all losses), or take an optimizer that writes the same")


def alike(one, other):
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6) or one != one and other != other
    return one == other
