"""What the state of a parameter consists of, as all ranks see it: what is cut as the parameter is, and what is not.

A state may be a tensor, a number, or dicts, lists, tuples and deques of such. A tensor in it is cut where on each rank
its last dimensions are those of the rank's piece; what is before them, as in a stack of k, stays whole. Everything else
is common: the same on all ranks that step a part of the parameter. What is neither is refused on all of them.
"""

import math
import zlib
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

from guard.schema import COMPUTABLE, Schema, Spec, check_state, described, lead_of, leaves, schema_of

from .boxes import local
from .json_values import SMALL, NotPackable, bytes_of, pack_apart, pack_data, path_of
from .optimizers import all_params, check_hyperparameters, hyperparameters, inner_of, steps_ranges
from .ranks import all_gather, errors_on_all

STATE = "optimizer.state."
TRIED: dict[tuple, Schema | None] = {}  # kind of optimizer and parameter -> what a trial has found, which takes 80 ms
MOST_TRIED = 1000
RANGE = (13,)  # the shape of a range to find out with: a number that nothing else in a state is likely to have


class OfAll(Schema):
    """Of one state for all parameters: its vectors have as many elements as all of them, which is the `shape`."""


class Told(NamedTuple):
    """What one rank tells the others of a tensor."""

    shape: tuple
    dtype: torch.dtype
    lead: tuple | None  # the dimensions before those of the piece; None: it has not the piece's shape
    content: object  # the data of a small one, packed; a checksum of a larger one that isn't cut


class Kept(NamedTuple):
    """A tensor of all ranks, as (*lead, elements). One that isn't cut is a single element with its shape as `lead`."""

    lead: tuple
    dtype: torch.dtype
    is_cut: bool
    owners: list[tuple[int, int, int]]  # (rank, start, stop), which are all of its elements

    def shape(self, of_a_part):
        return (*self.lead, *of_a_part) if self.is_cut else self.lead

    def part(self, tensor, piece, start, stop):
        """-> (*lead, stop - start): elements start to stop, from a tensor that has those of `piece`."""
        first, last = piece.in_whole if self.is_cut else (0, 1)
        flat = tensor if tensor.dim() == len(self.lead) + 1 else tensor.reshape(*self.lead, last - first)
        return flat if (start, stop) == (first, last) else flat[..., start - first : stop - first]


class Layout(NamedTuple):
    """A state, or a tensor of the model, agreed on by all ranks."""

    tree: object  # packed, as it stands in the manifest: {"piece": key} for what is cut, {"tensor": key} for what isn't
    tensors: dict[str, Kept]  # by key


def state_key(name):
    """What the keys of tensors in the state of a parameter begin with."""
    return f"{STATE}{name}."


def local_states(optimizer, pieces, all_main_params=False) -> dict[int, dict]:
    """-> index -> the inner optimizer's state of this rank's piece, with a "main_param" if the parameter has 16 bits.
    Without `all_main_params`, a parameter that was never stepped has none: torch would take it for a whole state."""
    inner, states = inner_of(optimizer), {}
    schemas = schemas_of(optimizer) if any(piece.has_main_param for piece in pieces.values()) else None
    for index, piece in pieces.items():
        states[index] = dict(inner.state.get(piece.main, {}))
        if piece.has_main_param:
            keeps_nothing = schemas[index] and not schemas[index].entries  # as SGD without momentum
            if all_main_params or states[index] or keeps_nothing:
                states[index]["main_param"] = piece.main
    return states


def refuse_unclaimed(optimizer):
    """Raise ValueError where an optimizer keeps something that belongs to no parameter."""
    inner = inner_of(optimizer)
    params = {id(param) for param in all_params(inner)}
    for key, value in inner.state.items():
        if id(key) not in params and (value or not isinstance(value, dict)):
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise ValueError(f"optimizer.state has an entry for {what}, which is no parameter that is stepped here: it "
                             "would be lost, remove it or keep it elsewhere")
    if added := inner.state_dict().keys() - {"state", "param_groups"}:
        raise ValueError(f"{type(inner).__name__}.state_dict() has {', '.join(map(str, added))}, which is of no "
                         "parameter and would be lost: keep it elsewhere")


def agree(optimizer, things, names, what, group):
    """-> first part of keys -> Layout, the same on all ranks; key -> this rank's tensor. Collective.
    `things`: first part of keys -> a state, see `state_key`, or a tensor; the piece that it is of. Raises RuntimeError,
    such as CheckpointError, on every rank if a state can't be kept, or groups have different values."""
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    told, tensors = {}, {}
    with errors_on_all(what, group):
        refuse_unclaimed(optimizer)
        for key, (value, piece) in things.items():
            told[key], its = describe(value, piece, key)
            tensors.update(its)
        schemas = schemas_of(optimizer) if steps_ranges(optimizer) else []  # whole ones are of the whole's shape
        fixed = {state_key(name): fixed_paths(schema) for name, schema in zip(names, schemas)}
    everyone, layouts = all_gather(told, group), {}
    with errors_on_all(what, group):
        for key in dict.fromkeys(key for theirs in everyone for key in theirs):
            parts = {}  # (start, stop) -> the first rank that has it: with a plain optimizer all have all of it
            for rank, theirs in enumerate(everyone):
                if key in theirs:
                    parts.setdefault(theirs[key][:2], (rank, *theirs[key]))
            if any(tree != {"dict": []} for *_, tree, _ in parts.values()):
                layouts[key] = layout_of(list(parts.values()), fixed.get(key, ()), key)
    return layouts, tensors


def describe(value, piece, key) -> tuple[tuple, dict[str, torch.Tensor]]:
    """-> (start, stop, packed, key -> Told) for the other ranks; key -> tensor. Raises ValueError: it can't be kept."""
    try:
        tree, tensors = pack_apart(value, key)
    except NotPackable as refusal:
        raise ValueError(f"{said(key)} has {refusal.path}, which can't be kept: {refusal}") from None
    told, tensors = {}, {its: local(tensor) for its, tensor in tensors.items()}
    for its, tensor in tensors.items():
        lead, content = lead_of(tensor.shape, piece.main.shape), None
        if tensor.numel() <= SMALL:
            content = pack_data(None, tensor)
        elif lead is None:
            content = zlib.crc32(bytes_of(tensor.cpu().contiguous()))
        told[its] = Told(tuple(tensor.shape), tensor.dtype, lead, content)
    return (*piece.in_whole, tree, told), tensors


def said(key):
    return f"the state of {key[len(STATE) : -1]}"


def layout_of(parts, fixed, prefix) -> Layout:
    """-> what `parts`, [(rank, start, stop, packed, key -> Told), …], are together. Raises ValueError: they don't fit.
    `fixed`: paths of what is common, whatever its shape says."""
    ranges, stands_for, kept = [part[:3] for part in parts], {}, {}
    for key in dict.fromkeys(key for *_, told in parts for key in told):
        have, path = [(rank, told[key]) for rank, *_, told in parts if key in told], key[len(prefix) :]
        (first_rank, first), *others = have
        if first.lead is not None and all(its.lead == first.lead for _, its in others) and path not in fixed:
            if len(have) < len(parts):
                raise ValueError(f"{said(prefix)} has {path} for some of its elements only: some ranks have stepped it "
                                 "and others not, or cleared it")
            stands_for[key] = {"piece": key}
            kept[key] = Kept(first.lead, first.dtype, True, owners_of(ranges) or ranges[:1])
            continue
        for rank, its in others:
            if its[:2] != first[:2] or its.content != first.content and math.prod(first.shape) > 1:
                raise ValueError(f"{path} in {said(prefix)} is another on rank {rank} than on rank {first_rank}, and "
                                 "no tensor of the parameter's shape: it can't be put together")
        if isinstance(first.content, dict):
            stands_for[key] = first.content
        else:
            kept[key] = Kept(first.shape, first.dtype, False, [(first_rank, 0, 1)])
    tree = next((tree for *_, tree, told in parts if told), parts[0][3])

    def is_tensor(packed):
        return isinstance(packed, dict) and packed.keys() == {"tensor"}

    tree = tree_map(lambda packed: stands_for.get(packed["tensor"], packed) if is_tensor(packed) else packed, tree,
                    is_leaf=is_tensor)
    return Layout(tree, kept)


def owners_of(ranges) -> list[tuple[int, int, int]]:
    """-> `ranges`, [(rank, start, stop), …], in order and without the overlaps that tensor-parallel ranks have."""
    found, end = [], 0
    for start, stop, rank in sorted((start, stop, rank) for rank, start, stop in ranges):
        if stop > end:
            found.append((rank, max(start, end), stop))
            end = stop
    return found


def schemas_of(optimizer, saved_groups=None) -> list[Schema | None]:
    """What is kept of each parameter. None: nobody knows; ValueError: no step is possible with what was saved."""
    check_hyperparameters(optimizer, saved_groups or ())
    schemas, saved_groups = [], iter(saved_groups or optimizer.param_groups)
    all_of_them = getattr(optimizer, "optimizers", [optimizer])  # of guard.chained.Chained
    for owner, group in [(one, group) for one in all_of_them for group in one.param_groups]:
        make, saved = getattr(owner, "make_optimizer", type(inner_of(owner))), next(saved_groups)
        if isinstance(owner, torch.optim.LBFGS):  # it can't be tried with one parameter: the first one's is of all
            of_all = OfAll({"func_evals": 0, "n_iter": 0}, False, (sum(param.numel() for param in group["params"]),))
            schemas += [of_all, *(Schema({}, False, tuple(param.shape)) for param in group["params"][1:])]
            continue
        options = hyperparameters(group), hyperparameters(saved)
        kind = getattr(make, "func", make), repr((getattr(make, "keywords", {}), *map(with_sign_of_lr, options)))
        for param in group["params"]:
            shape, dtype = local(param).shape, param.dtype
            if steps_ranges(owner):  # each element by itself
                shape, dtype = RANGE, torch.promote_types(dtype, torch.float32)
            key = kind, shape, dtype, param.device
            if key not in TRIED:
                if len(TRIED) > MOST_TRIED:  # a schedule changes what stands in groups at each save
                    TRIED.clear()
                TRIED[key] = schema_of(make, *options, shape, dtype, param.device)
            schemas.append(TRIED[key])
    return schemas


def with_sign_of_lr(options):
    """A schedule's next value makes no other state; one that is negative, say, is refused."""
    return {key: value > 0 if key in ("lr", "initial_lr") and type(value) is float else value
            for key, value in options.items()}


def check_states(schemas, names, states, shapes):
    """Raise ValueError unless `states`, by index, fit their schemas, and the `shapes` that there are."""
    for index, shape in shapes.items():
        name, schema, state = names[index], schemas[index], described(states.get(index, {}))
        if isinstance(state, dict) and "main_param" in state:
            main_param, state = state["main_param"], {key: state[key] for key in state if key != "main_param"}
            is_tensor = isinstance(main_param, Spec) and main_param.dtype in COMPUTABLE
            if not is_tensor or main_param.shape != tuple(shape):
                raise ValueError(f"main_param in the state of {name} is {main_param}, and none of shape {shape}")
        check_state(schema, state, schema.shape if isinstance(schema, OfAll) else shape, name)


def fixed_paths(schema) -> set[str]:
    """Of tensors in a state that have not the parameter's shape."""
    return {path_of(path) for path, value in leaves(schema.entries if schema else {})
            if isinstance(value, Spec) and lead_of(value.shape, schema.shape) is None}
