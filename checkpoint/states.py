"""What the state of a parameter consists of, as all ranks see it: what is cut as the parameter is, and what is not.

A state may be a tensor, a number, or dicts, lists, tuples and deques of such. A tensor in it is cut where on each rank
its last dimensions are those of the rank's piece; what is before them, as in a stack of k, stays whole. Everything else
is common: the same on all ranks that step a part of the parameter. What is neither is refused on all of them.
"""

import functools
import math
import zlib
from typing import NamedTuple

import torch

from guard.schema import COMPUTABLE, Schema, Spec, check_state, lead_of, leaves, schema_of

from .json_values import SMALL, NotPackable, bytes_of, pack, pack_apart, pack_data, path_of
from .optimizers import all_params, hyperparameters, inner_of, local, steps_ranges
from .ranks import all_gather, errors_on_all

TRIED: dict[tuple, Schema | None] = {}  # kind of optimizer and parameter -> what a trial has found, which takes 80 ms
MOST_TRIED = 1000
RANGE = (13,)  # the shape of a range to find out with: a number that nothing else in a state is likely to have


class OfAll(Schema):
    """Of one state for all parameters: its vectors have as many elements as all of them, which is the `shape`."""


class Tensor(NamedTuple):
    """What one rank tells the others of a tensor in its state."""

    shape: tuple
    dtype: torch.dtype
    lead: tuple | None  # the dimensions before those of the piece; None: it has not the piece's shape
    content: object  # the data of a small one, packed; a checksum of a larger one that isn't cut


class Part(NamedTuple):
    """What one rank tells the others of the state of its piece of a parameter."""

    start: int
    stop: int
    tree: object  # packed, with {"tensor": path} for each tensor
    tensors: dict[str, Tensor]


class Kept(NamedTuple):
    """A tensor of a state, as (*lead, elements). One that isn't cut is a single element with its shape as `lead`."""

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
    """The state of a parameter, agreed on by all ranks."""

    tree: object  # packed, with {"tensor": path} for each tensor, or {"data": …} for a small one that isn't cut
    tensors: dict[str, Kept]  # by path


def local_states(optimizer, pieces, all_main_params=False) -> dict[int, dict]:
    """-> index -> the inner optimizer's state of this rank's piece, with a "main_param" if the parameter has 16 bits.

    Without `all_main_params`, that of a parameter that was never stepped is left out: torch would take it for a whole
    state. The model has its value, except what rounding lost if it was loaded in fp32.
    """
    inner, params, states = inner_of(optimizer), all_params(optimizer), {}
    has_main = {i for i, piece in pieces.items() if piece.main.dtype != params[i].dtype}
    schemas = schemas_of(optimizer) if has_main else None
    for index, (_, _, main, _) in pieces.items():
        states[index] = dict(inner.state.get(main, {}))
        keeps_nothing = index in has_main and schemas[index] and not schemas[index].entries  # as SGD without momentum
        if index in has_main and (all_main_params or states[index] or keeps_nothing):
            states[index]["main_param"] = main
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
    added = inner.state_dict().keys() - {"state", "param_groups"}
    if added:
        raise ValueError(f"{type(inner).__name__}.state_dict() has {', '.join(map(str, added))}, which is of no "
                         "parameter and would be lost: keep it elsewhere")


def describe(state, piece, name) -> tuple[Part, dict[str, torch.Tensor]]:
    """-> what the other ranks are told of a state, and its tensors by path. Raises ValueError: it can't be kept."""
    try:
        tree, tensors = pack_apart(state)
    except NotPackable as refusal:
        raise ValueError(f"the state of {name} has {refusal.path}, which can't be kept: {refusal}") from None
    tensors = {path: local(tensor) for path, tensor in tensors.items()}
    told = {path: tell(tensor, piece.main.shape) for path, tensor in tensors.items()}
    return Part(*piece.in_whole, tree, told), tensors


def tell(value, shape) -> Tensor:
    lead, content = lead_of(value.shape, shape), None
    if value.numel() <= SMALL:
        content = pack_data(value)
    elif lead is None:
        content = zlib.crc32(bytes_of(value.cpu().contiguous()))
    return Tensor(tuple(value.shape), value.dtype, lead, content)


def agree_on_states(optimizer, states, pieces, names, what, group):
    """-> index -> Layout, the same on all ranks; and index -> path -> this rank's tensor. Collective.

    Raises CheckpointError on every rank if a state can't be kept, RuntimeError if groups have different values.
    """
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    mine, tensors, layouts = {}, {}, {}
    with errors_on_all(what, group):
        refuse_unclaimed(optimizer)
        for index, state in states.items():
            mine[index], tensors[index] = describe(state, pieces[index], names[index])
    everyone, schemas = all_gather(mine, group), functools.cache(lambda: schemas_of(optimizer))
    with errors_on_all(what, group):
        for index, name in enumerate(names):
            parts = {}  # (start, stop) -> the first rank that has it: with a plain optimizer all have all of it
            for rank, theirs in enumerate(everyone):
                if index in theirs:
                    parts.setdefault(theirs[index][:2], (rank, theirs[index]))
            if any(part.tree != pack({}, None) for _, part in parts.values()):
                schema = schemas()[index] if steps_ranges(optimizer) else None  # whole ones are of the whole's shape
                layouts[index] = layout_of(list(parts.values()), fixed_paths(schema), name)
    return layouts, tensors


def layout_of(parts, fixed, name) -> Layout:
    """`fixed`: paths of what is common, whatever its shape says. Raises ValueError: the parts don't fit each other."""
    owners, small, kept = owners_of([(rank, part.start, part.stop) for rank, part in parts]), {}, {}
    for path in dict.fromkeys(path for _, part in parts for path in part.tensors):
        have = [(rank, part.tensors[path]) for rank, part in parts if path in part.tensors]
        (first_rank, first), *others = have
        if first.lead is not None and all(its.lead == first.lead for _, its in others) and path not in fixed:
            if len(have) < len(parts):
                raise ValueError(f"the state of {name} has {path} for some of its elements only: some ranks have "
                                 "stepped it and others not, or cleared it")
            kept[path] = Kept(first.lead, first.dtype, True, owners)
            continue
        for rank, its in others:
            if its[:2] != first[:2] or its.content != first.content and math.prod(first.shape) > 1:
                raise ValueError(f"{path} in the state of {name} is another on rank {rank} than on rank {first_rank}, "
                                 "and no tensor of the parameter's shape: it can't be put together")
        if isinstance(first.content, dict):
            small[path] = first.content
        else:
            kept[path] = Kept(first.shape, first.dtype, False, [(first_rank, 0, 1)])
    tree = next((part.tree for _, part in parts if part.tensors), parts[0][1].tree)
    return Layout(with_data(tree, small), kept)


def owners_of(parts) -> list[tuple[int, int, int]]:
    """-> `parts`, [(rank, start, stop), …], in order and without the overlaps that tensor-parallel ranks have."""
    found, end = [], 0
    for start, stop, rank in sorted((start, stop, rank) for rank, start, stop in parts):
        if stop > end:
            found.append((rank, max(start, end), stop))
            end = stop
    return found


def with_data(tree, small):
    """The packed tree with the data of small tensors in it."""
    if isinstance(tree, list):
        return [with_data(item, small) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"tensor"}:
        return small.get(tree["tensor"], tree)
    return {name: with_data(what, small) for name, what in tree.items()}


def kind_of(dtype):
    """Floats stand for each other; of others each is a kind of its own."""
    return "float" if dtype.is_floating_point else dtype


def schemas_of(optimizer, saved_groups=None) -> list[Schema | None]:
    """What is kept of each parameter with the hyperparameters that were saved; None: that can't be found out.

    Raises ValueError: the optimizer can't step with what was saved.
    """
    schemas, saved_groups = [], iter(saved_groups or optimizer.param_groups)
    all_of_them = getattr(optimizer, "optimizers", [optimizer])  # of guard.chained.Chained
    for owner, group in [(one, group) for one in all_of_them for group in one.param_groups]:
        make, saved = getattr(owner, "make_optimizer", type(inner_of(owner))), next(saved_groups)
        if isinstance(owner, torch.optim.LBFGS):
            schemas += schemas_of_lbfgs(group["params"])
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


def schemas_of_lbfgs(params) -> list[Schema]:
    """It can't be tried with one parameter: the first one's state is of all, and the others have none.

    Its vectors are there from the first step on, unless that has found nothing to do.
    """
    of_all = OfAll({"func_evals": 0, "n_iter": 0}, False, (sum(param.numel() for param in params),))
    return [of_all, *(Schema({}, False, tuple(param.shape)) for param in params[1:])]


def with_sign_of_lr(options):
    """A schedule's next value makes no other state; one that is negative, say, is refused."""
    return {key: value > 0 if key in ("lr", "initial_lr") and type(value) is float else value
            for key, value in options.items()}


def check_states(optimizer, names, states, saved_groups):
    """Raise ValueError unless `states`, name -> described state, are what this optimizer keeps. -> its schemas."""
    schemas = schemas_of(optimizer, saved_groups)
    for name, param, schema in zip(names, all_params(optimizer), schemas):
        state = states.get(name, {})
        if isinstance(state, dict) and "main_param" in state:
            main_param, state = state["main_param"], {key: state[key] for key in state if key != "main_param"}
            is_tensor = isinstance(main_param, Spec) and main_param.dtype in COMPUTABLE
            if not is_tensor or main_param.shape != param.shape:
                raise ValueError(f"main_param in the state of {name} is {main_param}, and none of shape {param.shape}")
        check_kept(schema, state, param.shape, name)
    return schemas


def check_kept(schema, state, shape, name):
    """Raise ValueError unless a described state is what a schema says of a parameter of this shape."""
    check_state(schema, state, schema.shape if isinstance(schema, OfAll) else shape, name)


def fixed_paths(schema) -> set[str]:
    """Of tensors in a state that have not the parameter's shape."""
    return {path_of(path) for path, value in leaves(schema.entries if schema else {})
            if isinstance(value, Spec) and lead_of(value.shape, schema.shape) is None}
