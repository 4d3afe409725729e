"""Helpers for parameter groups, and a check that all ranks have the same hyperparameters.

Situation: a scheduler sets the lr from the loss of one rank (ReduceLROnPlateau). Ranks with different settings would
silently mix two trainings. So the groups are compared whenever ranks communicate anyway: in the constructor, in
`add_param_group`, before a full state or a save, and in stage 4, as a checksum, before each step. What the inner
optimizer writes into its groups is compared in the following step. Shown by tests/stages/test_users.py,
`test_settings_that_differ_between_ranks_are_an_error_on_every_rank`.
"""

import math
import numbers
import zlib

import torch
import torch.distributed as dist


def all_params(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def named_params(groups):
    """Return [(name, parameter), …] for messages. Without names in the groups, a parameter is named by its place."""
    return [(group["param_names"][i] if "param_names" in group else f"{i} of group {g}", param)
            for g, group in enumerate(groups) for i, param in enumerate(group["params"])]


def name_of(param, groups):
    return next(name for name, named in named_params(groups) if named is param)


def hyperparameters(group):
    """Return what a parameter group holds beside its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_hyperparameters(sources, targets):
    """Copy the hyperparameters of the groups `sources` into the groups `targets`, of which there are as many."""
    for source, target in zip(sources, targets):
        target.update(hyperparameters(source))


def spread_over(param):
    """Return the process groups over which the elements of a DTensor are spread; for any other tensor, ()."""
    placements = enumerate(getattr(param, "placements", ()))
    return tuple(param.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


def settings_of(groups):
    """Return {name such as "lr of group 0" or "betas[1] of group 0": number or text}: see `comparable`."""
    settings = {}
    for g, group in enumerate(groups):
        for key, value in hyperparameters(group).items():
            is_sequence = isinstance(value, (tuple, list))
            for place, part in enumerate(value if is_sequence else [value]):
                name = f"{key}[{place}]" if is_sequence else key
                settings[f"{name} of group {g}"] = part
    return comparable(settings)


def comparable(settings):
    """Return those of `settings` that all ranks can compare, {name: number or text}.

    Only plain values and one-element CPU tensors: reading a tensor on a GPU would wait for the GPU.
    """
    plain = {}
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        if isinstance(value, str):
            plain[name] = value
        elif isinstance(value, numbers.Real):
            plain[name] = float(value)
    return plain


def checksum_of(settings):
    """Return 31 bits, which fit an int32. Floats count with nine digits, because cosines differ between CPUs."""
    values = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in settings.values()]
    return zlib.crc32(" ".join(values).encode()) >> 1


def first_difference(settings, process_group):
    """Say what differs by more than rounding, on rank 0 and on which other rank, or return None. Collective.

    `settings`: of this rank, by name.
    """
    by_rank = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(by_rank, settings, group=process_group)
    for rank, settings_of_rank in enumerate(by_rank):
        for name in by_rank[0] | settings_of_rank:
            first, other = by_rank[0].get(name), settings_of_rank.get(name)
            are_floats = isinstance(first, float) and isinstance(other, float)
            if first != other and not (are_floats and math.isclose(first, other, rel_tol=1e-6)):
                return f"{name} is {first} on rank 0 and {other} on rank {rank}"
    return None


def error_if_settings_differ(settings, process_group):
    """Return a RuntimeError, on every rank, if the settings of the ranks differ, or None. Collective."""
    if difference := first_difference(settings, process_group):
        return RuntimeError(f"{difference}: set the same on every rank (feed ReduceLROnPlateau with the average of all "
                            "losses), or take an optimizer that writes the same")
