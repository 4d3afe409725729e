"""Keeps parameter groups equal: our groups, the inner optimizer's groups, and the groups of the other ranks.

Situation: a program has an optimizer class of its own, which reads attributes of parameters, writes into its groups, or
replaces the tensors that it steps. Shown by tests/stages/test_own_classes.py,
`test_a_class_of_ones_own_trains_as_in_plain_torch`.

Situation: a scheduler sets the lr from the loss of one rank (ReduceLROnPlateau). Ranks with different settings would
silently mix two trainings. So the ranks compare their groups whenever they communicate anyway: in the constructor, in
`add_param_group`, before a full state or a save, and in stage 4, as a checksum, before each step. A value that the
inner optimizer writes into its groups is compared in the following step. Shown by tests/stages/test_users.py,
`test_settings_that_differ_between_ranks_are_an_error_on_every_rank`.
"""

import itertools
import math
import numbers
import zlib

import torch
import torch.distributed as dist


def all_params(optimizer):
    """Return the parameters of all groups, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def named_params(groups):
    """Return [(name, parameter), …]. Without names in the groups, the name is the place, such as "0 of group 1"."""
    named = []
    for number, group in enumerate(groups):
        places = [f"{place} of group {number}" for place in range(len(group["params"]))]
        named += zip(group.get("param_names") or places, group["params"])
    return named


def name_of(param, groups):
    """Return the name of a parameter for messages."""
    return next(name for name, other_param in named_params(groups) if other_param is param)


def hyperparameters(group):
    """Return the entries of a parameter group other than its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def with_indices(groups):
    """Return copies of groups with indices in place of parameters, counted through all groups, as in a state_dict."""
    indices = itertools.count()
    return [{**group, "params": [next(indices) for _ in group["params"]]} for group in groups]


def as_python(value):
    """Return a NumPy number, which a schedule may leave, as a Python number, and any other value unchanged.

    torch.load(weights_only=True) refuses NumPy numbers.
    """
    is_numpy_number = isinstance(value, numbers.Number) and hasattr(value, "item")
    return value.item() if is_numpy_number else value


def share_attributes(groups, own_groups, param_of):
    """Give each main parameter the attributes and the name of its parameter: an inner optimizer may read p.lr_mul.

    A main parameter is what the inner optimizer steps: a parameter, or a piece of it. Parameter and main parameter then
    share one dict of attributes. So the inner optimizer sees later changes, too.

    Args:
        groups: groups of the model's parameters.
        own_groups: the same groups, with the main parameters of this rank in place of the model's parameters.
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
    assign `p.data` in place of writing into `p`. With plain tensors such a class trains. Here its parameters are views
    of the buffer that is sent, and its gradients are views of the buffer in which gradients arrive.

    Attributes:
        main_params, grads: the tensors that the inner optimizer has got.
        views: for each of these tensors another view of the same memory, which the optimizer class can't reach.
    """

    def __init__(self, main_params):
        self.main_params = list(main_params)
        self.grads = [main.grad for main in self.main_params]
        self.views = [tensor.detach() for tensor in self.main_params + self.grads]

    def take_back(self):
        """After a step give each tensor its own memory again, with its present values, and each parameter its gradient.
        """
        tensors = self.main_params + self.grads
        address_of = torch.Tensor.data_ptr
        if list(map(address_of, tensors)) != list(map(address_of, self.views)):  # the class has assigned `data`
            for main, view in zip(self.main_params, self.views):
                if main.data_ptr() != view.data_ptr():
                    view.copy_(main)
            for tensor, view in zip(tensors, self.views):
                tensor.data = view
        for main, grad in zip(self.main_params, self.grads):
            if main.grad is not grad:
                main.grad = grad


def mesh_groups_of(param):
    """Return the process groups over which the elements of a DTensor are spread; () for any other tensor."""
    placements = enumerate(getattr(param, "placements", ()))
    return tuple(param.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


def settings_of(groups, others=()):
    """Return {"lr of group 0": number, "betas[1] of group 0": number, …, **others}, for the ranks to compare.

    others: name -> value, further settings. Values that are no number, text or CPU tensor of one element are left out:
    reading a tensor on a GPU would wait.
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
    """Return a checksum of the values in `settings`, of 31 bits: the checksum and its negative fit into an int32.

    Floats count with nine digits, because a cosine schedule may differ in the last bit between two CPUs.
    """
    # Sorted by name, because ranks may have added the settings in another order.
    values = [f"{value:.9g}" if isinstance(value, float) else str(value) for _, value in sorted(settings.items())]
    return zlib.crc32(" ".join(values).encode()) >> 1


def first_difference(settings, process_group):
    """Return a text about a setting that differs between the first rank and another one. Collective.

    None: all ranks have the same settings, but for the rounding of floats.
    settings: name -> number or text, on this rank.
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
    if difference := first_difference(settings, process_group):
        return RuntimeError(f"{difference}: set the same on every rank (feed ReduceLROnPlateau with the average of all "
                            "losses), or take an optimizer that writes the same")
    return None
