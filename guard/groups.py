"""What is asked everywhere of parameter groups, with names or without, and of their parameters."""


def all_params(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def named_params(groups):
    """Every parameter with a name for messages: its own where the groups have names, else its place."""
    return [
        (group["param_names"][i] if "param_names" in group else f"{i} of group {g}", param)
        for g, group in enumerate(groups)
        for i, param in enumerate(group["params"])
    ]


def name_of(param, groups):
    return next(name for name, named in named_params(groups) if named is param)


def param_ids(groups):
    return [[id(param) for param in group["params"]] for group in groups]


def hyperparameters(group):
    """What a parameter group holds beside its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_hyperparameters(sources, targets):
    """Into the groups of another optimizer, as many, whatever is in the groups `sources`."""
    for source, target in zip(sources, targets):
        target.update(hyperparameters(source))


def spread_over(param):
    """The process groups over which the elements of a DTensor are spread; of any other tensor, none."""
    placements = enumerate(getattr(param, "placements", ()))
    return tuple(param.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())
