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
    """Return [(name, parameter), …] for messages: a parameter's own name if the groups have names, else its place."""
    return [(group["param_names"][i] if "param_names" in group else f"{i} of group {g}", param)
            for g, group in enumerate(groups) for i, param in enumerate(group["params"])]


def name_of(param, groups):
    return next(name for name, other_param in named_params(groups) if other_param is param)


def hyperparameters(group):
    """Return what a parameter group holds beside its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def as_python(value):
    """Return a number of NumPy's, as a schedule may leave, as Python's: torch.load(weights_only=True) refuses those."""
    is_numpys = isinstance(value, numbers.Number) and hasattr(value, "item")
    return value.item() if is_numpys else value


def copy_hyperparameters(sources, targets):
    """Copy the hyperparameters of the groups `sources` into the groups `targets`, of which there are as many."""
    for source, target in zip(sources, targets):
        target.update(hyperparameters(source))


def mesh_groups_of(param):
    """Return the process groups over which the elements of a DTensor are spread; for any other tensor, ()."""
    placements = enumerate(getattr(param, "placements", ()))
    return tuple(param.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


def settings_of(groups):
    """Return {"lr of group 0": number, "betas[1] of group 0": number, …}; see `comparable_settings`."""
    settings = {}
    for g, group in enumerate(groups):
        for key, value in hyperparameters(group).items():
            if isinstance(value, (tuple, list)):
                settings.update({f"{key}[{i}] of group {g}": part for i, part in enumerate(value)})
            else:
                settings[f"{key} of group {g}"] = value
    return comparable_settings(settings)


def comparable_settings(settings):
    """Return those of `settings` that ranks can compare: name -> number or text.

    These are plain values and one-element CPU tensors. A tensor on a GPU isn't compared: reading it would wait for it.
    """
    plain = {}
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        if isinstance(value, (str, numbers.Real)):
            plain[name] = value if isinstance(value, str) else float(value)
    return plain


def checksum_of(settings):
    """Return a checksum of 31 bits, which fits a signed int32, and so does its negative.

    Floats count with nine digits, because a cosine schedule may differ in the last bit between two CPUs.
    """
    values = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in settings.values()]
    return zlib.crc32(" ".join(values).encode()) >> 1


def first_difference(settings, process_group):
    """Name a setting that differs between the first rank and another one, with both values. Else None. Collective.

    Floats may differ by rounding. `settings`: this rank's, name -> number or text.
    """
    by_rank = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(by_rank, settings, group=process_group)
    first_rank, *_ = ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    for rank, settings_of_rank in zip(ranks, by_rank):
        for name in by_rank[0] | settings_of_rank:
            first, other = by_rank[0].get(name), settings_of_rank.get(name)
            are_close = {type(first), type(other)} == {float} and math.isclose(first, other, rel_tol=1e-6)
            if first != other and not are_close:  # by more than rounding
                return f"{name} is {first} on rank {first_rank} and {other} on rank {rank}"
    return None


def error_if_settings_differ(settings, process_group):
    """Return on every rank a RuntimeError if the settings of the ranks differ, or else None. Collective."""
    if difference := first_difference(settings, process_group):
        return RuntimeError(f"{difference}: set the same on every rank (feed ReduceLROnPlateau with the average of all "
                            "losses), or take an optimizer that writes the same")
    return None
