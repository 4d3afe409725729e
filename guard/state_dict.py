"""Makes a state_dict in torch's form of an optimizer whose state is spread over ranks, and loads such a state_dict.

In the distributed optimizers of this project each rank updates a part of the parameters by an *inner optimizer*, such
as torch's AdamW.

    main parameter    the tensor that the inner optimizer steps: a parameter, or a flat piece of it, in fp32 if the
                      parameter has 16 bits. A rank has a state for its main parameters only
    entry             a value in the state of a parameter, which is a dict, under a name such as "exp_avg"
    cut               of a cut entry, each rank has only the elements for its own part of the parameter
    FlatShard         a cut entry in the state_dict: a tensor that looks like the whole, and has this rank's elements
    Schema            a description of the entries; schema.py learns it from a *step on trial*, by which another
                      optimizer of the class updates a parameter that is made for this purpose

Situation: torch's get_state_dict() and set_state_dict(), accelerate and Lightning save an optimizer by its state_dict.
All ranks must have entries of the same names, also for parameters that they don't update. A Schema tells a rank the
names without a message. Shown by tests/checkpoint/test_torch.py.
"""

import copy
import itertools
import numbers
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .flat_shard import FlatShard
from .groups import all_params, as_python, hyperparameters, mesh_groups_of, named_params, settings_of, with_indices
from .refuse import agree
from .schema import COMPUTABLE, Schema, Spec, check_state, fresh_state, schema_of
from .states import MAIN_PARAM


class Part(NamedTuple):
    """What this rank updates of a parameter, or of the *local part* of a parameter that is a DTensor.

    It updates the flat elements `start` to `stop`. On a rank that updates no element, start == stop.
    """

    label: str  # "parameter " and its name, for messages
    param: torch.Tensor
    main: Any  # the main parameter, which the inner optimizer steps. None: this rank updates no element
    start: int
    stop: int
    offsets: tuple  # where the local part begins in the whole parameter
    sizes: tuple  # shape of the local part. A plain tensor is its own local part
    is_replica: bool  # whether another rank, with the same local part, writes it into a checkpoint for both
    options: dict  # hyperparameters of the parameter's group
    schema: Schema | None  # entries: {name: Spec of a tensor, or a number}. None: the class can't step one parameter
    dtype: torch.dtype  # dtype of the main parameter
    gather: Any  # collective function: value of this rank -> values of all ranks with parts, for FlatShard.full_tensor

    @property
    def has_one_owner(self):
        """Return whether one rank updates the whole parameter, or the whole local part, as in stages 1 and 2."""
        # schema.shape: the shape of the parameter that was stepped on trial, flat if ranks step flat pieces.
        stepped_shape = self.schema.shape if self.schema else self.main.shape
        return stepped_shape == self.sizes  # a flat piece of a parameter is stepped in another shape

    def shard(self, elements):
        """Return a FlatShard with `elements`, this rank's part of a tensor that has the parameter's shape."""
        return FlatShard(self.param.shape, self.start, self.stop, elements.detach().reshape(-1), self.offsets,
                         self.sizes, self.is_replica, self.gather)

    def is_cut(self, name, value):
        """Return whether the entry `name` is cut, because it has an element for each element of the parameter.

        Moments are cut, for example. value: this rank's tensor, or a Spec, which has its shape and dtype.
        """
        if name == "step":  # torch's name for a count of steps, which may have the shape of a scalar parameter
            return False
        entry = self.schema.entries.get(name) if self.schema else None
        if entry is None:  # the step on trial has not made this entry, but a later step of the optimizer has
            return value.shape in (self.main.shape, self.param.shape)
        return isinstance(entry, Spec) and entry.shape == self.schema.shape


def parts_of(optimizer) -> list[Part]:
    """Return a list with the Part of each parameter, in the order of the groups."""
    # id of a parameter of which this rank updates a piece -> (main parameter, start, stop).
    piece_of = {id(param): (main, start, stop) for param, start, stop, main in optimizer.pieces()}
    mesh_groups = other_mesh_groups(optimizer)
    # For each parameter the hyperparameters of its group.
    options_of_each = [hyperparameters(group) for group in optimizer.param_groups for _ in group["params"]]
    parts = []
    for (name, param), options in zip(named_params(optimizer.param_groups), options_of_each):
        main, start, stop = piece_of.get(id(param), (None, 0, 0))
        offsets, sizes = box_of(param)
        # A DTensor may be spread over groups other than the optimizer's own: either the ranks of a group have different
        # parts of it, or they have copies, of which the first rank's is saved.
        groups_with_parts = mesh_groups_of(param)
        groups_with_copies = [group for group in mesh_groups if group not in groups_with_parts]
        is_replica = any(dist.get_rank(group) > 0 for group in groups_with_copies)
        # Shape and dtype of the parameter in the step on trial.
        shape, dtype = optimizer._stepped_as(param)
        schema = schema_of(optimizer.make_optimizer, options, shape, dtype, param.device)
        gather = gather_over([optimizer.process_group, *groups_with_parts])
        # In the order of Part's fields.
        parts.append(Part(f"parameter {name}", param, main, start, stop, offsets, sizes, is_replica, options, schema,
                          dtype, gather))
    return parts


def other_mesh_groups(optimizer):
    """Return the process groups of the device meshes of DTensors, without the optimizer's own process group."""
    meshes = dict.fromkeys(param.device_mesh for param in all_params(optimizer) if hasattr(param, "device_mesh"))
    own_ranks = dist.get_process_group_ranks(optimizer.process_group or dist.group.WORLD)
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    return [group for group in groups if dist.get_process_group_ranks(group) != own_ranks]


def box_of(param):
    """Return (offsets, sizes): where the local part of `param` begins in the whole, and the shape of the local part.

    If `param` is no DTensor, the local part is `param` itself.
    """
    if not hasattr(param, "placements"):
        return (0,) * param.dim(), tuple(param.shape)
    for placement in param.placements:
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise ValueError(f"a DTensor with placement {placement} isn't one box: only Shard and Replicate are kept")
    (chunk,) = param.__create_chunk_list__()  # a method for torch.distributed.checkpoint. A "chunk" is a local part
    return tuple(chunk.offsets), tuple(chunk.sizes)


def gather_over(groups):
    """Return a collective function: value of this rank -> list of the values of all ranks that have a part of a tensor.

    groups: process groups of this rank. It gathers the values of the first group's ranks, then the lists of the second
        group's ranks, and so on.
    """
    def gather(value):
        values = [value]
        for group in groups:
            values_of_ranks = [None] * dist.get_world_size(group)
            dist.all_gather_object(values_of_ranks, values, group=group)
            values = list(itertools.chain(*values_of_ranks))
        return values
    return gather


# ------------------------------------------------------------------------------------------------------------- saving


def state_dict_of(optimizer, with_fresh=True):
    """Return {"state": {index: {name: value}}, "param_groups": […], "n_steps": …}. Not collective.

    torch's optimizers return the first two. `n_steps` is the number of steps that were taken. `load_state_dicts`
    compares it between the ranks.

    with_fresh: whether a parameter without a state gets the *fresh* entries that an optimizer has before its first
        step. torch needs them, because torch.distributed.checkpoint loads only entries that are there.
    """
    # Begin with the states that an optimizer class keeps under keys that are no parameters. torch saves them, too.
    # optimizer.optimizer is the inner optimizer.
    state = {key: value for key, value in optimizer.optimizer.state.items() if not isinstance(key, torch.Tensor)}
    for index, part in enumerate(parts_of(optimizer)):
        entries = entries_of(optimizer, part, with_fresh)
        if entries is not None:
            state[index] = entries
    # as_python: NumPy's numbers as Python's. with_indices: each parameter's index in its place, as in torch's form.
    groups = [{key: as_python(value) for key, value in group.items()} for group in optimizer.param_groups]
    return {"state": state, "param_groups": with_indices(groups), "n_steps": optimizer._n_steps}


def entries_of(optimizer, part, with_fresh):
    """Return the entries of a parameter's state, name -> value. None: the parameter is frozen or was never stepped.

    If this rank has no state yet, the entries are fresh, as before a first step, or None if `with_fresh` is False.

    A rank that updates no element of the parameter returns FlatShards without elements, also for entries that aren't
    cut, such as "step". torch.distributed.checkpoint writes a plain value of one rank only, and that might be this
    rank's value, which is out of date.
    """
    may_be_fresh = part.param.requires_grad and with_fresh
    if not part.param.numel():  # a parameter without elements: no rank updates it, so all return the same fresh state
        param = part.param.detach().to(part.dtype)
        return fresh_state(optimizer.make_optimizer, part.options, param) if may_be_fresh else None
    if part.start == part.stop:
        return empty_entries(part)
    state = optimizer.optimizer.state.get(part.main, {})
    keeps_nothing = part.schema and not part.schema.entries  # for example, SGD without momentum has no state
    if not state and not keeps_nothing:
        if not may_be_fresh:
            return None
        state = fresh_state(optimizer.make_optimizer, part.options, part.main)
    entries = {name: saved_value(part, name, value) for name, value in state.items()}
    if part.dtype != part.param.dtype:  # the main parameter is an fp32 copy, so it is an entry, too
        # _main_to_save detaches it from autograd. In variants/remainder16.py it returns a copy.
        entries[MAIN_PARAM] = part.shard(optimizer._main_to_save(part.main))
    return entries


def empty_entries(part):
    """Return {name in the schema: FlatShard without elements} for a parameter that this rank doesn't update.

    None: the parameter is frozen, or the class can't step one parameter alone.
    """
    if part.schema is None or not part.param.requires_grad:
        return None
    entries = {}
    for name, value in part.schema.entries.items():
        spec = value if isinstance(value, Spec) else Spec((), torch.float32)  # a scalar tensor for a number
        shape = part.param.shape if part.is_cut(name, value) else spec.shape
        entries[name] = FlatShard(shape, 0, 0, torch.empty(0, dtype=spec.dtype, device=part.param.device),
                                  gather=part.gather)
    if part.dtype != part.param.dtype:
        entries[MAIN_PARAM] = part.shard(torch.empty(0, dtype=part.dtype, device=part.param.device))
    return entries


def saved_value(part, name, value):
    """Convert `value`, the entry `name` of a state on this rank, to what is saved.

    Raises ValueError if `value` is neither cut nor scalar, and several ranks have parts of the parameter. Their values
    may differ, and a state_dict has room for one value.
    """
    if isinstance(value, torch.Tensor):
        if part.is_cut(name, value):
            return part.shard(value)
        if value.numel() == 1:
            return value.detach()
        if part.has_one_owner:  # a FlatShard with all elements
            return FlatShard(value.shape, 0, value.numel(), value.detach().reshape(-1), gather=part.gather)
    elif part.has_one_owner or not isinstance(value, (dict, list, tuple)):
        return as_python(value)
    # Several ranks have parts of the parameter, and each of these ranks has a value of this kind.
    raise ValueError(f"the state of {part.label} has {name}, neither a scalar nor a tensor of the parameter's shape: "
                     "stages 1 and 2 can save it, since there each parameter has one owner")


# ------------------------------------------------------------------------------------------------------------ loading


class PreparedLoad(NamedTuple):
    """Everything that a load changes, computed before the first change. `install` makes the changes."""

    main_params: list  # [(main parameter, its new value), …]
    inner: Any  # a copy of the inner optimizer, which has the new state
    options: list[dict]  # for each group its new hyperparameters
    n_steps: int  # the number of steps taken when the state_dict was made


def load_state_dicts(optimizers, state_dicts, process_group):
    """Load the first of `state_dicts` into the first of `optimizers`, and so on. Collective.

    If a rank can't load, every rank raises an error before anything changes.

    process_group: all ranks that call this function. An optimizer may be on some of these ranks only.
    """
    first_error = None
    prepared_loads = []
    device = all_params(optimizers[0])[0].device
    for optimizer, state_dict in zip(optimizers, state_dicts):
        try:
            prepared_loads.append(prepared_on_all_ranks(optimizer, state_dict, device))
        except Exception as error:  # not raised yet, because ranks without this optimizer wait in agree() below
            first_error = first_error or error
    # agree() raises on every rank if a rank has an error, or if the settings, {name: number}, differ between ranks.
    if len(optimizers) > 1:  # tell all ranks; with one optimizer, its ranks have agreed already
        agree(first_error, {}, process_group, device)
    elif first_error:
        raise first_error
    for optimizer, prepared in zip(optimizers, prepared_loads):
        install(optimizer, prepared)
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)


def prepared_on_all_ranks(optimizer, state_dict, device) -> PreparedLoad:
    """Return this rank's PreparedLoad. If a rank of the optimizer can't load, all its ranks raise. Collective."""
    error = None
    settings = {}
    try:
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(optimizer, dict(state_dict)) or state_dict  # a hook may return a state_dict, or None
        prepared = prepared_load(optimizer, state_dict)
        # The hyperparameters of all groups, {"lr of group 0": number, …}, and the number of steps.
        settings = {**settings_of(prepared.options), "n_steps": float(prepared.n_steps)}
    except Exception as failure:
        error = failure
    agree(error, settings, optimizer._agreement_group, device)  # raises if this rank, or another rank, has an error
    return prepared


def prepared_load(optimizer, state_dict) -> PreparedLoad:
    """Return the changes that loading `state_dict` makes on this rank, without making them. Not collective.

    Raises ValueError: `state_dict` is of another optimizer, or has elements that other ranks update.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"load_state_dict() takes what state_dict() returned, not a {type(state_dict).__name__} "
                         "without 'state' and 'param_groups'")
    if "world_size" in state_dict:
        raise ValueError("this state_dict was made by version 0.3 or before: load it with that version, and save a "
                         "checkpoint.full_state_dict(optimizer)")
    states = state_dict["state"]
    saved_groups = state_dict["param_groups"]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != own_sizes:
        raise ValueError(f"this state_dict has groups of {saved_sizes} parameters, this optimizer has {own_sizes}")
    # For each parameter of this optimizer, in order, its key in `states`: an index or a name.
    keys = [key for group in saved_groups for key in group["params"]]
    for key in states.keys() - set(keys):
        if not isinstance(key, str):
            raise ValueError(f"this state_dict has a state of {key!r}, which is in none of its groups")
    main_params = []  # (main parameter, its new value)
    state_of = {}  # main parameter -> its new state
    for key, part in zip(keys, parts_of(optimizer)):
        if part.start == part.stop:  # this rank updates nothing of the parameter
            continue
        entries = states.get(key, {}).items()
        state = {name: loaded_value(part, name, value) for name, value in entries if not is_missing(value)}
        main_param = state.pop(MAIN_PARAM, None)
        if part.dtype != part.param.dtype:
            if main_param is None:  # made by a plain torch optimizer, without main parameters: use the 16-bit parameter
                local_param = getattr(part.param, "_local_tensor", part.param).detach()
                main_param = local_param.reshape(-1)[part.start : part.stop]
            main_params.append((part.main, checked_main_param(part, main_param)))
        check_state(part.schema, state, part.main.shape, part.label)
        state_of[part.main] = {name: with_strides_of(part.main, value) for name, value in state.items()}
    # States that the class keeps under keys that are no parameters.
    of_no_parameter = {key: states[key] for key in states.keys() - set(keys)}
    options = [copy.deepcopy(hyperparameters(group)) for group in saved_groups]
    inner = inner_with(optimizer.optimizer, state_of, of_no_parameter, options)
    return PreparedLoad(main_params, inner, options, state_dict.get("n_steps", 0))


def is_missing(value):
    """Return whether `value` is an empty dict. torch puts an empty dict in place of an entry that isn't in a file."""
    return isinstance(value, dict) and not value


def loaded_value(part, name, value):
    """Return the new value of the entry `name` in the state of this rank's part. `value`: the entry in a state_dict.

    If `value` is a tensor for the whole parameter, this rank's part is cut out of it.
    """
    if isinstance(value, FlatShard):
        if value.was_broadcast:  # torch gathers the parts of DTensors only, and broadcasts rank 0's FlatShard
            raise ValueError(f"{name} of {part.label} is one rank's part, since torch's full_state_dict=True gathers "
                             "DTensors alone: call checkpoint.full_state_dict(optimizer)")
        if value.place == (tuple(part.param.shape), part.offsets, part.sizes, part.start, part.stop):
            return value.local.view(part.main.shape)
        # A FlatShard may also have all elements of its whole, for example if the entry isn't cut. The whole has
        # value.numel() elements; if it is empty, it doesn't count as complete.
        is_complete = value.local.numel() == value.numel() > 0
        if not is_complete:
            raise ValueError(f"{name} of {part.label} has elements {value.start} to {value.stop}, this rank needs "
                             f"{part.start} to {part.stop}: save with torch.distributed.checkpoint, which cuts states "
                             "for other ranks and buckets, or load a checkpoint.full_state_dict(optimizer)")
        value = value.local.view(value.shape)
    if hasattr(value, "placements"):
        raise ValueError(f"{name} of {part.label} is a DTensor: save it with torch.distributed.checkpoint, which cuts "
                         "it anew, or load its full_tensor()")
    is_whole = isinstance(value, torch.Tensor) and value.shape == part.param.shape
    is_cut_here = part.param.shape != part.main.shape
    if is_whole and is_cut_here and (name == MAIN_PARAM or part.is_cut(name, value)):
        local_box = tuple(slice(begin, begin + size) for begin, size in zip(part.offsets, part.sizes))
        return value[local_box].reshape(-1)[part.start : part.stop].clone().view(part.main.shape)
    return value


def checked_main_param(part, value):
    """Return `value` in the shape of this part's main parameter.

    Raises ValueError: it is no tensor of floats, or has another number of elements.
    """
    is_fit = isinstance(value, torch.Tensor) and value.dtype in COMPUTABLE and value.numel() == part.main.numel()
    if not is_fit:
        raise ValueError(f"{MAIN_PARAM} in the state of {part.label} must be a tensor of {part.main.numel()} floats")
    return value.view(part.main.shape)


def with_strides_of(main, value):
    """Return `value`. A tensor of the shape of `main` is returned with the strides of `main`.

    A fused kernel ignores strides, so it would combine elements of `value` with other elements of `main`.
    """
    if not isinstance(value, torch.Tensor) or value.shape != main.shape or value.stride() == main.stride():
        return value
    return torch.empty_like(main, dtype=value.dtype).copy_(value)


def inner_with(inner, state_of, of_no_parameter, options):
    """Return a copy of the optimizer `inner` that has loaded other states and hyperparameters.

    The class's own load_state_dict() loads them. torch's converts integer tensors to floats, so this function then sets
    the entries that are no float tensors once more.

    Args:
        state_of: main parameter -> its new state.
        of_no_parameter: key that is no parameter -> the new state under this key.
        options: for each group its new hyperparameters.
    """
    # A shallow copy is enough, because torch's load_state_dict() assigns a new `state` and new `param_groups`, and
    # doesn't change the objects that were there.
    inner_copy = object.__new__(type(inner))
    vars(inner_copy).update(vars(inner))
    # The inner optimizer's groups, with the new hyperparameters in place of the old.
    groups = [{**group, **copy.deepcopy(new_options)} for group, new_options in zip(inner.param_groups, options)]
    # As in a state_dict the keys are indices. Parameters without a state are left out.
    states = {index: state_of[main] for index, main in enumerate(all_params(inner)) if state_of.get(main)}
    inner_copy.load_state_dict({"state": {**states, **of_no_parameter}, "param_groups": with_indices(groups)})
    for main, state in state_of.items():
        for name, value in state.items():
            # torch's load_state_dict() leaves numbers as they are, and "step", and float tensors stay floats.
            is_float_tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
            stays_as_loaded = is_float_tensor or isinstance(value, numbers.Number) or name == "step"
            if not stays_as_loaded:
                inner_copy.state[main][name] = value
    return inner_copy


def install(optimizer, prepared):
    """Make the changes in `prepared`, a PreparedLoad. A hyperparameter that is a tensor stays the same tensor."""
    for main, value in prepared.main_params:
        main.copy_(value)
    # The program may have a reference to the inner optimizer, so it stays the same object, with new attributes.
    vars(optimizer.optimizer).update(vars(prepared.inner))
    optimizer._n_steps = prepared.n_steps
    for group, options in zip(optimizer.param_groups, prepared.options):
        for key, value in options.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
