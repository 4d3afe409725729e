"""What the state of a parameter consists of, as all ranks see it: what is cut as the parameter is, and what is not.

A state may be a tensor, a number, or dicts, lists, tuples and deques of such. A tensor in it is cut where on each rank
its last dimensions are those of the rank's piece; what is before them, as in a stack of k, stays whole. Everything else
is common: the same on all ranks that step a part of the parameter. What is neither is refused on all of them.
"""

import collections
import math
import zlib
from typing import NamedTuple

import torch

from guard.schema import COMPUTABLE, LISTS, Spec, check_state, described, lead_of

from .optimizers import (
    all_params,
    as_python,
    inner_of,
    local,
    offsets_of,
    paths_of_common,
    schemas_of,
    steps_ranges,
)
from .ranks import all_gather, errors_on_all

LARGEST_COMMON = 16  # elements of a tensor that may be common although its shape is that of a piece


class Part(NamedTuple):
    """Flat elements `start` to `stop` of the box of a parameter that begins at `offsets`, which a rank updates."""

    rank: int
    offsets: tuple
    start: int
    stop: int


class Entry(NamedTuple):
    """What a rank tells the others of one value in a state."""

    lead: tuple | None  # of a tensor: the dimensions before those of the piece; None: it has not the piece's shape
    spec: Spec | None  # of a tensor
    checksum: int | None  # of a tensor that may be the same on all ranks
    value: object  # of anything else


class Layout(NamedTuple):
    """The state of a parameter, agreed on by all ranks."""

    tree: object  # see `tree_of`
    cut: dict[str, Entry]  # path of a tensor that is cut -> what the first rank tells of its part
    common: dict[str, tuple[int, Entry]]  # path of any other value -> the first rank that has it, and what it tells
    parts: list[Part]  # all elements of the parameter, each once


def tree_of(state):
    """Return `state` with None in place of each value. A deque becomes a tuple: "deque", its maxlen, its items."""
    if isinstance(state, dict):
        return {key: tree_of(item) for key, item in state.items()}
    if type(state) is collections.deque:
        return "deque", state.maxlen, *map(tree_of, state)
    return type(state)(map(tree_of, state)) if type(state) in LISTS else None


def filled(tree, values, path=()):
    """Return the state of which `tree_of` has returned `tree`, with `values`, path -> value."""
    if isinstance(tree, dict):
        return {key: filled(item, values, (*path, key)) for key, item in tree.items()}
    if type(tree) not in LISTS:
        return values[path_of(path)]
    is_deque = tree[:1] == ("deque",)
    items = [filled(item, values, (*path, place)) for place, item in enumerate(tree[2:] if is_deque else tree)]
    return collections.deque(items, tree[1]) if is_deque else type(tree)(items)


def flat(state, path=()) -> dict[str, object]:
    """Return path -> value of everything in `state`. Raises ValueError if two paths read alike, as {1: …, "1": …}."""
    if not isinstance(state, dict) and type(state) not in LISTS:
        return {path_of(path): state}
    values = {}
    for key, item in state.items() if isinstance(state, dict) else enumerate(state):
        below = flat(item, (*path, key))
        if below.keys() & values.keys():
            raise ValueError(f"a state can't be kept: two of its keys read {min(below.keys() & values.keys())}")
        values |= below
    return values


def path_of(path) -> str:
    return ".".join(map(str, path))


def local_states(optimizer, pieces, all_main_params=False) -> dict[int, dict]:
    """Return index -> the inner optimizer's state of this rank's piece, with a "main_param" if the parameter has 16
    bits. Without `all_main_params`, a parameter that was never stepped has none: torch would take it for a whole state.
    """
    refuse_unclaimed(optimizer)
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


def agree(optimizer, states, pieces, names, what, group) -> dict[str, Layout]:
    """Return name -> Layout of each parameter that some rank has a piece of, the same on all ranks. Collective.

    `states`, `pieces`, `names`: of this rank, by index. Raises RuntimeError, such as CheckpointError, on every rank if
    a state can't be kept, or groups have different values.
    """
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    entries_of, common = {}, {}
    with errors_on_all(what, group):
        for index, piece in pieces.items():
            where = offsets_of(piece.param, names[index]), piece.start, piece.stop
            values = flat(states[index])
            refuse_unkept(values, names[index])
            entries_of[names[index]] = where, tree_of(states[index]), {path: entry_of(value, piece)
                                                                for path, value in values.items()}
        if steps_ranges(optimizer):  # whole parameters are of the whole's shape
            common = {names[index]: paths_of_common(schema) for index, schema in enumerate(schemas_of(optimizer))}
    parts = {}  # name -> {(offsets, start, stop): (the first rank that has it, what it tells)}
    for rank, of_rank in enumerate(all_gather(entries_of, group)):
        for name, (where, *rest) in of_rank.items():
            parts.setdefault(name, {}).setdefault(where, (rank, *rest))
    with errors_on_all(what, group):
        return {name: layout_of(name, by_rank, common.get(name, ())) for name, by_rank in parts.items()}


def refuse_unkept(values, name):
    """Raise ValueError if a state has what no file can hold."""
    for path, value in values.items():
        kind = type(value)
        if not isinstance(as_python(value), (bool, int, float, complex, str, bytes, torch.Tensor, type(None))):
            raise ValueError(f"the state of {name} has {path}, which can't be kept: it holds "
                             f"{kind.__module__}.{kind.__qualname__}")


def entry_of(value, piece) -> Entry:
    if not isinstance(value, torch.Tensor):
        return Entry(None, None, None, as_python(value))
    value = local(value)
    lead = lead_of(value.shape, piece.main.shape)
    may_be_common = lead is None or value.numel() <= LARGEST_COMMON
    return Entry(lead, described(value), checksum_of(value) if may_be_common else None, None)


def checksum_of(tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).numpy())


def layout_of(name, parts, common) -> Layout:
    """Return what `parts` are together. Raises ValueError: they don't fit.

    `common`: paths of what isn't cut, whatever its shape says.
    """
    tree = next((tree for _, tree, entries in parts.values() if entries), {})
    layout = Layout(tree, {}, {}, parts_without_overlaps(parts))
    for path in dict.fromkeys(path for *_, entries in parts.values() for path in entries):
        have = [(rank, entries[path]) for rank, _, entries in parts.values() if path in entries]
        (first_rank, first), *rest = have
        is_shaped = all(entry.lead == first.lead is not None for _, entry in have)
        if is_shaped and path not in common:
            if len(have) < len(parts):
                raise ValueError(f"the state of {name} has {path} for some of its elements only: some ranks "
                                 "have stepped it and others not, or cleared it")
            layout.cut[path] = first
            continue
        for rank, entry in rest:
            is_number = first.spec is not None and math.prod(first.spec.shape) == 1
            if entry.spec != first.spec or entry[2:] != first[2:] and not is_number:
                raise ValueError(f"{path} in the state of {name} is another on rank {rank} than on rank "
                                 f"{first_rank}, and no tensor of the parameter's shape: it can't be put together")
        layout.common[path] = first_rank, first
    return layout


def parts_without_overlaps(parts) -> list[Part]:
    """Return `parts`, (offsets, start, stop) -> (rank, …), in order, and each element once.

    Tensor-parallel ranks have other borders of the buckets, and so overlapping ranges of a parameter that isn't cut.
    """
    disjoint, end = [], None
    for (offsets, start, stop), (rank, *_) in sorted(parts.items(), key=lambda part: part[0]):
        if not disjoint or disjoint[-1].offsets != offsets:
            end = 0
        if stop > end:
            disjoint.append(Part(rank, offsets, max(start, end), stop))
            end = stop
    return disjoint


def check_states(schemas, names, states, shapes):
    """Raise ValueError unless `states`, by index, fit their schemas, and the `shapes` that there are."""
    for index, shape in shapes.items():
        name, schema, state = names[index], schemas[index], described(states.get(index, {}))
        if isinstance(state, dict) and "main_param" in state:
            main_param, state = state["main_param"], {key: state[key] for key in state if key != "main_param"}
            is_tensor = isinstance(main_param, Spec) and main_param.dtype in COMPUTABLE
            if not is_tensor or main_param.shape != tuple(shape):
                raise ValueError(f"main_param in the state of {name} is {main_param}, and none of shape {shape}")
        check_state(schema, state, shape, name)
