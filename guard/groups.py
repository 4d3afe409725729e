"""Keeps a distributed optimizer's parameter groups equal to its inner optimizer's, and to the other ranks' groups.

    parameter group    torch's dict of parameters and their hyperparameters; a distributed optimizer has groups of all
                       parameters of the model
    inner optimizer    an optimizer of torch, such as AdamW, that updates this rank's part; it has as many groups, with
                       main parameters in place of parameters
    main parameter     a tensor that the inner optimizer steps: in stages 1 and 2 of this project a parameter, in stages
                       3 and 4 a flat piece of a parameter, in fp32 if the parameter has 16 bits

Situation: a program has an optimizer class of its own, which reads attributes of parameters, writes into its groups, or
replaces the tensors that it steps. Shown by tests/stages/test_own_classes.py,
`test_a_class_of_ones_own_trains_as_in_plain_torch`.

Situation: a scheduler sets the lr from the loss of one rank (ReduceLROnPlateau). Ranks with different settings would
silently mix two trainings. So the ranks compare their groups: in the constructor, in `add_param_group`, before the
state is saved or gathered into one dict, and in stage 4, as a checksum, before each step. A value that the inner
optimizer writes into its groups is compared in the following step. Shown by tests/stages/test_users.py,
`test_settings_that_differ_between_ranks_are_an_error_on_every_rank`.
"""

import itertools
import math
import numbers
import zlib

import torch
import torch.distributed as dist


def all_params(optimizer):
    """Return the parameters of all groups of an optimizer, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def named_params(groups):
    """Return [(name, parameter), …] of all groups.

    A group that was made from named parameters has their names as "param_names". In any other group the name of a
    parameter is its place, such as "0 of group 1".
    """
    named = []
    for number, group in enumerate(groups):
        places = [f"{place} of group {number}" for place in range(len(group["params"]))]
        named += zip(group.get("param_names") or places, group["params"])
    return named


def name_of(param, groups):
    """Return the name that `named_params` gives to `param`, for messages."""
    return next(name for name, other_param in named_params(groups) if other_param is param)


def hyperparameters(group):
    """Return the entries of a parameter group other than its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def with_indices(groups):
    """Return copies of groups, with the index of each parameter in place of the parameter, as torch's state_dict has.

    The parameters are counted through all groups.
    """
    indices = itertools.count()
    return [{**group, "params": [next(indices) for _ in group["params"]]} for group in groups]


def as_python(value):
    """Return `value` as a Python number if it is a NumPy number; otherwise return it unchanged.

    A schedule may leave a NumPy number in a group, and torch.load(weights_only=True) refuses NumPy numbers.
    """
    is_numpy_number = isinstance(value, numbers.Number) and hasattr(value, "item")
    return value.item() if is_numpy_number else value


def share_attributes(groups, own_groups, param_of):
    """Give each main parameter the attributes of its parameter, such as `lr_mul`. Write the names into `own_groups`.

    Both share one dict of attributes. So if a program changes an attribute of the parameter later, the inner optimizer
    reads the new value.

    Args:
        groups: groups of the model's parameters.
        own_groups: the same groups, with the main parameters of this rank in place of the model's parameters.
        param_of: main parameter -> parameter.
    """
    for group, own_group in zip(groups, own_groups):
        for main in own_group["params"]:
            main.__dict__ = param_of[main].__dict__
        if "param_names" in group:
            names = dict(zip(group["params"], group["param_names"]))  # parameter -> name
            own_group["param_names"] = [names[param_of[main]] for main in own_group["params"]]


class InnerTensors:
    """Main parameters and their gradients, which the inner optimizer has in stages 3 and 4.

    There main parameters are views of a buffer that is sent to the other ranks, and their gradients are views of a
    buffer in which averaged gradients arrive. A user's own class may assign `p.data`, `p.grad` or `p.grad.data` in its
    step, or drop gradients. That cuts the connection between a tensor and its buffer. `take_back` restores the
    connection after each step.

    Attributes:
        main_params: the main parameters, which the inner optimizer steps.
        grads: the gradients of the main parameters, views of the buffer. They must be there before this object is made.
        views: for each of these tensors, first for the parameters, another view of the same memory. The class can't
            reach these views.
    """

    def __init__(self, main_params):
        self.main_params = list(main_params)
        self.grads = [main.grad for main in self.main_params]
        self.views = [tensor.detach() for tensor in self.main_params + self.grads]

    def take_back(self):
        """After a step, make each tensor a view of its buffer again, and give each main parameter its gradient again.

        Main parameters keep their new values. The values of gradients aren't needed any more.
        """
        tensors = self.main_params + self.grads
        address_of = torch.Tensor.data_ptr
        # One comparison of all addresses, because it is fast, and most classes never assign `data`.
        if list(map(address_of, tensors)) != list(map(address_of, self.views)):
            for main, view in zip(self.main_params, self.views):  # zip() ends before the views of gradients
                if main.data_ptr() != view.data_ptr():
                    view.copy_(main)
            for tensor, view in zip(tensors, self.views):
                tensor.data = view
        for main, grad in zip(self.main_params, self.grads):
            if main.grad is not grad:
                main.grad = grad


def mesh_groups_of(param):
    """Return a tuple of the process groups over which the elements of a DTensor are spread; () for any other tensor.

    A DTensor has a mesh of ranks. Along each dimension of the mesh it is either replicated or spread over a group.
    """
    placements = enumerate(getattr(param, "placements", ()))
    return tuple(param.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


def settings_of(groups, others=()):
    """Return {"lr of group 0": number, "betas[1] of group 0": number, …, **others}, for the ranks to compare.

    others: name -> value, further settings.
    A value that is no number, no text and no CPU tensor of one element is left out. To read a tensor on a GPU, the rank
    would have to wait for the GPU.
    """
    settings = dict(others)
    for number, group in enumerate(groups):
        for key, value in hyperparameters(group).items():
            if isinstance(value, (tuple, list)):
                settings.update({f"{key}[{i}] of group {number}": part for i, part in enumerate(value)})
            else:
                settings[f"{key} of group {number}"] = value
    comparable = {}
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        if isinstance(value, (str, numbers.Real)):
            comparable[name] = value if isinstance(value, str) else float(value)
    return comparable


def checksum_of(settings):
    """Return a checksum of the values in `settings`.

    It has 31 bits, because callers also send its negative, as int32. Floats count with nine digits, because a cosine
    schedule may differ in the last bit between two CPUs.
    """
    # Sorted by name, because ranks may have added the settings in another order.
    values = [f"{value:.9g}" if isinstance(value, float) else str(value) for _, value in sorted(settings.items())]
    return zlib.crc32(" ".join(values).encode()) >> 1


def first_difference(settings, process_group):
    """Return a text about a setting that differs between the first rank of the group and another rank. Collective.

    settings: name -> number or text, on this rank.
    Returns None if all ranks have the same settings. Floats may differ a little, by rounding.
    """
    settings_of_ranks = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(settings_of_ranks, settings, group=process_group)
    first_settings = settings_of_ranks[0]
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    for rank, settings_of_rank in zip(ranks, settings_of_ranks):
        for name in first_settings | settings_of_rank:
            first = first_settings.get(name)
            other = settings_of_rank.get(name)
            are_floats = type(first) is type(other) is float
            are_alike = math.isclose(first, other, rel_tol=1e-6) if are_floats else first == other
            if not are_alike:
                return f"{name} is {first} on rank {ranks[0]} and {other} on rank {rank}"
    return None


def error_if_settings_differ(settings, process_group):
    """Return a RuntimeError on every rank if the settings of the ranks differ; None if they don't. Collective."""
    # Either a scheduler has set another lr here, or the optimizer's class writes other values into its groups here.
    if difference := first_difference(settings, process_group):
        return RuntimeError(f"{difference}: set the same on every rank (feed ReduceLROnPlateau with the average of all "
                            "losses), or take an optimizer that writes the same")
    return None
