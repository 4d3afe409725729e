"""Finds which values in the state of a parameter are cut into pieces, as the parameter is, and which are common.

A state may be a tensor, a number, or dicts, lists, tuples and deques of such. A tensor is cut if on each rank its last
dimensions have the shape of the rank's piece; leading dimensions, as of a stack, aren't cut. Any other value is common:
it must be the same on all ranks that step a part of the parameter, or all of them refuse it.
"""

import collections
import math
import zlib
from typing import NamedTuple

import torch

from guard.schema import COMPUTABLE, LIST_TYPES, Spec, check_state, leading_dims_of, with_specs

from .optimizers import all_params, as_python, inner_of, local, offsets_of, paths_of_common, schemas_of, steps_ranges
from .ranks import all_gather, errors_on_all
from .storage import joined

LARGEST_COMMON = 16  # a tensor of so few elements may have a piece's shape by chance, and be common


class Part(NamedTuple):
    """A range of a parameter that one rank writes: flat elements `start` to `stop` of the box that is at `offsets`."""

    rank: int
    offsets: tuple
    start: int
    stop: int


class Entry(NamedTuple):
    """What a rank tells the others of one value in a state."""

    lead: tuple | None = None  # of a tensor: the dimensions before those of the piece; None: it hasn't its shape
    spec: Spec | None = None  # of a tensor
    content: object = None  # the value, or the checksum of a tensor that may be the same on all ranks


class PieceReport(NamedTuple):
    """What a rank tells the others of its piece of a parameter, and of its state."""

    range: tuple  # offsets, start, stop, as in Part
    tree: object  # see `tree_of`
    entries: dict[str, Entry]  # by path


class Layout(NamedTuple):
    """The state of a parameter, agreed on by all ranks."""

    tree: object  # see `tree_of`
    leads: dict[str, tuple]  # path of a tensor that is cut -> the dimensions before those of the piece
    parts: list[Part]  # all elements of the parameter, each once


def tree_of(state):
    """Return `state` with None in place of each value. A deque becomes a tuple: "deque", its maxlen, its items."""
    if isinstance(state, dict):
        return {key: tree_of(item) for key, item in state.items()}
    if type(state) is collections.deque:
        return "deque", state.maxlen, *map(tree_of, state)
    return type(state)(map(tree_of, state)) if type(state) in LIST_TYPES else None


def filled(tree, values, path=()):
    """Put `values`, path -> value, back into a `tree` of `tree_of`. Return the state."""
    if isinstance(tree, dict):
        return {key: filled(item, values, (*path, key)) for key, item in tree.items()}
    if type(tree) not in LIST_TYPES:
        return values[joined(path)]
    is_deque = tree[:1] == ("deque",)
    items = [filled(item, values, (*path, place)) for place, item in enumerate(tree[2:] if is_deque else tree)]
    return collections.deque(items, tree[1]) if is_deque else type(tree)(items)


def flat(state, path=()) -> dict[str, object]:
    """Return path -> value of everything in `state`. Raises ValueError if two paths read alike, as {1: …, "1": …}."""
    if not isinstance(state, dict) and type(state) not in LIST_TYPES:
        return {joined(path): state}
    values = {}
    for key, item in state.items() if isinstance(state, dict) else enumerate(state):
        below = flat(item, (*path, key))
        if below.keys() & values.keys():
            raise ValueError(f"a state can't be kept: two of its keys read {min(below.keys() & values.keys())}")
        values |= below
    return values


def local_states(optimizer, pieces, all_main_params=False) -> dict[int, dict]:
    """Return index -> the inner optimizer's state of this rank's piece, with a "main_param" if the parameter has 16
    bits. Without `all_main_params`, a parameter that was never stepped has none: torch takes any entry for a state.
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
        was_only_read = isinstance(value, dict) and not value  # a defaultdict then has an empty entry
        if id(key) not in params and not was_only_read:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise ValueError(f"optimizer.state has an entry for {what}, which is no parameter that is stepped here: it "
                             "would be lost, remove it or keep it elsewhere")
    if added := inner.state_dict().keys() - {"state", "param_groups"}:
        raise ValueError(f"{type(inner).__name__}.state_dict() has {', '.join(map(str, added))}, which is of no "
                         "parameter and would be lost: keep it elsewhere")


def agree(optimizer, states, pieces, names, error_prefix, group) -> dict[str, Layout]:
    """Return name -> Layout of each parameter that some rank has a piece of, the same on all ranks. Collective.

    `states`, `pieces`, `names`: of this rank, by index. Raises RuntimeError, such as CheckpointError, on every rank if
    a state can't be kept, or parameter groups have different values.
    """
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    reports, common = {}, {}
    with errors_on_all(error_prefix, group):
        for index, piece in pieces.items():
            values = flat(states[index])
            refuse_unkept(values, names[index])
            reports[names[index]] = PieceReport(
                (offsets_of(piece.param, names[index]), piece.start, piece.stop), tree_of(states[index]),
                {path: entry_of(value, piece) for path, value in values.items()})
        if steps_ranges(optimizer):  # a whole parameter has the shape that its state has
            common = {names[index]: paths_of_common(schema) for index, schema in enumerate(schemas_of(optimizer))}
    by_name = {}  # name -> range -> (the first rank that has it, its PieceReport)
    for rank, reports_of_rank in enumerate(all_gather(reports, group)):
        for name, report in reports_of_rank.items():
            by_name.setdefault(name, {}).setdefault(report.range, (rank, report))
    with errors_on_all(error_prefix, group):
        return {name: layout_of(name, [*by_range.values()], common.get(name, ())) for name, by_range in by_name.items()}


def refuse_unkept(values, name):
    """Raise ValueError if a state has what no file can hold."""
    for path, value in values.items():
        kind = type(value)
        if not isinstance(as_python(value), (bool, int, float, complex, str, bytes, torch.Tensor, type(None))):
            raise ValueError(f"the state of {name} has {path}, which can't be kept: it holds "
                             f"{kind.__module__}.{kind.__qualname__}")


def entry_of(value, piece) -> Entry:
    if not isinstance(value, torch.Tensor):
        return Entry(content=as_python(value))
    value = local(value)
    lead = leading_dims_of(value.shape, piece.main.shape)
    may_be_common = lead is None or value.numel() <= LARGEST_COMMON
    return Entry(lead, with_specs(value), checksum_of(value) if may_be_common else None)


def checksum_of(tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).numpy())


def layout_of(name, reports, common) -> Layout:
    """Combine the `reports` of all parts, (rank, PieceReport), into a Layout. Raises ValueError if they contradict.

    `common`: paths of what isn't cut, whatever its shape says.
    """
    tree = next((report.tree for _, report in reports if report.entries), {})
    leads = {}
    for path in dict.fromkeys(path for _, report in reports for path in report.entries):
        entries = [(rank, report.entries[path]) for rank, report in reports if path in report.entries]
        (first_rank, first), *others = entries
        is_shaped = first.lead is not None and all(entry.lead == first.lead for _, entry in others)
        if is_shaped and path not in common:
            if len(entries) < len(reports):
                raise ValueError(f"the state of {name} has {path} for some of its elements only: some ranks "
                                 "have stepped it and others not, or cleared it")
            leads[path] = first.lead
            continue
        is_number = first.spec is not None and math.prod(first.spec.shape) == 1  # as a count of steps, which may differ
        for rank, entry in others:
            if entry.spec != first.spec or entry.content != first.content and not is_number:
                raise ValueError(f"{path} in the state of {name} is another on rank {rank} than on rank "
                                 f"{first_rank}, and no tensor of the parameter's shape: it can't be put together")
    return Layout(tree, leads, parts_without_overlaps([(rank, *report.range) for rank, report in reports]))


def parts_without_overlaps(ranges) -> list[Part]:
    """Return the Parts of `ranges`, (rank, offsets, start, stop), in order, and each element once.

    With tensor parallelism the borders of buckets differ between ranks, so ranges of a replicated parameter overlap.
    """
    parts, end = [], None
    for rank, offsets, start, stop in sorted(ranges, key=lambda part: part[1:]):
        if not parts or parts[-1].offsets != offsets:
            end = 0
        if stop > end:
            parts.append(Part(rank, offsets, max(start, end), stop))
            end = stop
    return parts


def check_states(schemas, names, states, shapes):
    """Raise ValueError unless `states` fit their schemas and `shapes`, index -> shape of the piece."""
    for index, shape in shapes.items():
        name = names[index]
        schema = schemas[index]
        state = with_specs(states.get(index, {}))
        if isinstance(state, dict) and "main_param" in state:
            main_param, state = state["main_param"], {key: state[key] for key in state if key != "main_param"}
            is_tensor = isinstance(main_param, Spec) and main_param.dtype in COMPUTABLE
            if not is_tensor or main_param.shape != tuple(shape):
                raise ValueError(f"main_param in the state of {name} is {main_param}, and none of shape {shape}")
        check_state(schema, state, shape, name)
