"""Parameter groups: ours, those of the inner optimizer, and those of the other ranks.

Situation: an optimizer class of one's own, which reads attributes of parameters, writes into its groups, or replaces
the tensors that it steps. Shown by tests/stages/test_own_classes.py,
`test_a_class_of_ones_own_trains_as_in_plain_torch`.

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


def share_attributes(groups, own_groups, param_of):
    """Give each main parameter the attributes of its parameter, and its name: an inner optimizer may read p.lr_mul.

    Both share one dict of attributes, so what is set later counts too.

    Args:
        groups, own_groups: of the model's parameters, and the same of main parameters.
        param_of: main parameter -> parameter.
    """
    for group, own_group in zip(groups, own_groups):
        for main in own_group["params"]:
            main.__dict__ = param_of[main].__dict__
        if "param_names" in group:
            name_of = dict(zip(group["params"], group["param_names"]))
            own_group["param_names"] = [name_of[param_of[main]] for main in own_group["params"]]


class InnerTensors:
    """Main parameters and their gradients, which the inner optimizer has in stages 3 and 4.

    A class of a user's own may assign `p.grad` or `p.grad.data` in its step, free gradients, end with zero_grad(), or
    assign `p.data` in place of writing into `p`. With plain tensors such a class trains. Here it steps views: of the
    buffer that is sent, and of the buffer in which gradients arrive.

    Attributes:
        main_params, grads: as the inner optimizer was given them.
        views: of each of these tensors another view of the same memory, out of a class's reach.
    """

    def __init__(self, main_params):
        self.main_params = list(main_params)
        self.grads = [main.grad for main in self.main_params]
        self.views = [tensor.detach() for tensor in self.main_params + self.grads]

    def take_back(self):
        """After a step, give each tensor its memory again, with what a parameter has now, and parameters gradients."""
        tensors = self.main_params + self.grads
        address_of = torch.Tensor.data_ptr
        if list(map(address_of, tensors)) != list(map(address_of, self.views)):
            for main, view in zip(self.main_params, self.views):
                if main.data_ptr() != view.data_ptr():
                    view.copy_(main)
            for tensor, view in zip(tensors, self.views):
                tensor.data = view
        for main, grad in zip(self.main_params, self.grads):
            if main.grad is not grad:
                main.grad = grad


def mesh_groups_of(param):
    """Return the process groups over which the elements of a DTensor are spread; for any other tensor, ()."""
    placements = enumerate(getattr(param, "placements", ()))
    return tuple(param.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


def settings_of(groups, others=()):
    """Return {"lr of group 0": number, "betas[1] of group 0": number, …, **others} without what ranks can't compare.

    Ranks compare plain values and one-element CPU tensors. A tensor on a GPU isn't compared: reading it would wait.
    """
    settings = dict(others)
    for g, group in enumerate(groups):
        for key, value in hyperparameters(group).items():
            if isinstance(value, (tuple, list)):
                settings.update({f"{key}[{i}] of group {g}": part for i, part in enumerate(value)})
            else:
                settings[f"{key} of group {g}"] = value
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
