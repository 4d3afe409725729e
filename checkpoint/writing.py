"""Checkpoints are written: each rank writes what it owns, and the folder has its name when everything is in it.

What is written knows neither ranks nor buckets nor padding: it loads in any stage and in a plain torch optimizer.
Source of the idea: the "universal" checkpoints of DeepSpeed and of Megatron-LM's distributed optimizer.
"""

import atexit
import contextlib
import errno
import itertools
import os
import shutil
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist

from guard.schema import Spec, described

from .boxes import box_of, cuts_of
from .errors import CheckpointError, UnfitModel
from .folder import claim, refuse_existing
from .full_state import filled
from .json_values import NotPackable, pack, pack_apart, pack_data
from .manifest import FORMAT, MANIFEST, manifest_of, most_bytes, sealed
from .optimizers import (
    Piece,
    all_params,
    inner_of,
    itself,
    local,
    names_of,
    packed_groups,
    pieces_in_whole,
    ranks_of,
    state_of,
    unwrapped,
)
from .rank_files import Part, name_of, whole, write_rank_file
from .ranks import all_gather, at_own_pace, errors_on_all, first_line, rank_and_size, rank_in
from .states import Kept, agree_on_states, check_states, local_states, owners_of, with_data

WRITERS = weakref.WeakKeyDictionary()  # the group of all ranks, or optimizer if there is none -> see `writer_of`
UNTOLD = {}  # path of an asynchronous save that failed -> why; until somebody has got the error


def save(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: object = None,
         *, asynchronous: bool = False) -> Future[None]:
    """Write a checkpoint: a folder `path`, which appears when everything is in it. Collective; of a tensor-parallel
    model over all ranks of its mesh.

    Args:
        path: a folder that doesn't exist, where all ranks can write; until it does, there is a "….partial" beside it.
            Other runs can't save folders beside it whose names differ in the number at their end only.
        model: its parameters and buffers are saved by name, and the optimizer's state by those names. What is not the
            optimizer's is saved as the first rank has it: experts of another process group need another folder.
        optimizer: a DistributedOptimizer of any stage, or a torch optimizer, which must not be of DTensors.
        extra: anything more of this rank, such as random states: numbers, texts, bytes, tensors, dtypes, devices, and
            dicts, lists, tuples, sets and deques of these. What parameter groups hold must be like that too.
        asynchronous: copy everything to the CPU, wait for the save before, and write while training goes on.

    Returns a Future: `.result()` waits, and raises what went wrong; call that of the last one before
    destroy_process_group(). Where nobody does, the next save raises it, or a line says it when Python ends.

    Raises, on every rank:
        dist.DistError: a rank is missing, see `at_own_pace`.
        UnfitModel: `optimizer` is of another model, or plain and of DTensors, or the model's state_dict() has copies of
            its tensors, or an extra state.
        FolderInUse: another run saves there.
        CheckpointError: `path` exists, or can't be written; `extra`, a parameter group or a state can't be read again;
            an earlier asynchronous save has failed; or, if `asynchronous`, the ranks are in unlike numbers of groups.
    """
    optimizer = itself(optimizer)
    group, what = ranks_of(optimizer), f"checkpoint {path} can't be written"
    rank, world_size = rank_in(group)
    if earlier := getattr(optimizer, "last_save", lambda: None)():
        wait([earlier])  # one at a time
    tell_failures(what, group)
    with errors_on_all(what, group):
        path, model = Path(path), unwrapped(model)
        names = names_of(model, optimizer)
        groups, packed_extra, large = packed(optimizer, names, extra, rank)
        pieces = pieces_in_whole(optimizer)
        states, mine = local_states(optimizer, pieces), held(model, optimizer, pieces, names)
    everyone = all_gather(mine, group)
    with errors_on_all(what, group):
        owners = owners_of_model(everyone)
    thread, own_group = writer_of(optimizer, group) if asynchronous else (None, None)
    layouts, tensors = agree_on_states(optimizer, states, pieces, names, what, group)
    partial = None
    with errors_on_all(what, group):
        refuse_unloadable(optimizer, layouts, names)
    with errors_on_all(what, group, is_named=False):
        if rank == 0:
            partial = claim(path, dist.get_rank() if dist.is_initialized() else 0)
    partial = path.with_name(all_gather(partial, group)[0])  # it is written there until it is complete
    with removed_on_error(partial):
        with errors_on_all(what, group):
            owned = collect(model, optimizer, pieces, names, layouts, tensors, large, owners, rank, asynchronous)
            manifest = {"optimizer": type(inner_of(optimizer)).__name__, "ranks": world_size, "groups": groups,
                        "model": list(state_of(model)), "states": packed_states(names, layouts), "extra": packed_extra}
    if not asynchronous:
        future = Future()
        future.set_result(write(path, partial, owned, manifest, group))
        return future
    future = Saving(path)
    thread.submit(write_behind, future, write, path.absolute(), partial.absolute(), owned, manifest, own_group)
    optimizer.last_save = weakref.ref(future)  # one that failed has `owned` in its traceback
    return future


def packed(optimizer, names, extra, rank):
    """-> groups and `extra` for the manifest; key -> tensors of `extra`. Raises ValueError: no load could read it."""
    groups = []
    try:
        for group in packed_groups(optimizer):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [names[index] for index in group["params"]],
                           "options": pack(options, lambda _, value: pack_data(value))})
        return groups, *pack_apart(extra, f"extra.{rank}.", with_small=True)
    except NotPackable as refusal:
        raise ValueError(f"load() can't read `extra` or a parameter group again: {refusal}") from None


def held(model, optimizer, pieces, names) -> dict[str, tuple]:
    """-> name of a tensor of the model -> shape, dtype, and which elements this rank has to write, if no other does."""
    index_of, found = {id(param): index for index, param in enumerate(all_params(optimizer))}, {}
    for name, tensor in state_of(model).items():
        index, box, elements = index_of.get(id(tensor)), box_of(tensor), None
        if index in pieces:
            elements = pieces[index].in_whole
        elif index is None or not tensor.numel():  # not the optimizer's
            elements = box.base, box.base + box.numel
        found[name] = tuple(tensor.shape), tensor.dtype, elements
    return {**found, "the optimizer's parameters": (names, None, None)}


def owners_of_model(everyone) -> dict[str, list[tuple[int, int, int]]]:
    """-> name -> [(rank, start, stop), …]: who writes which elements. Raises UnfitModel: the models differ."""
    parts = {name: [] for name in everyone[0]}
    for rank, theirs in enumerate(everyone):
        pairs = itertools.zip_longest(everyone[0].items(), theirs.items(), fillvalue=("", (None, None, None)))
        for (name, its), (other, their) in pairs:
            if (name, *its[:2]) != (other, *their[:2]):
                what = name or other
                raise UnfitModel(f"the ranks have different models: {what} isn't the same on ranks 0 and {rank}")
            if their[2]:
                parts[name].append((rank, *their[2]))
    return {name: owners_of(those) or those[:1] for name, those in parts.items()}  # also one without elements


def refuse_unloadable(optimizer, layouts, names):
    """Raise ValueError where `load` would refuse the states."""
    found = {}
    for index, layout in layouts.items():
        shape = all_params(optimizer)[index].shape
        specs = {path: Spec(kept.shape(shape), kept.dtype) for path, kept in layout.tensors.items()}
        found[names[index]] = described(filled(layout.tree, specs.get))
    check_states(optimizer, names, found, optimizer.param_groups)


@contextlib.contextmanager
def removed_on_error(partial):
    """But not when a rank is missing: it may be writing there."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def packed_states(names, layouts) -> dict:
    """-> name of a parameter -> its state, in which each tensor is the key of one in the files, or has its data."""
    states = {}
    for index, layout in layouts.items():
        keys = {path: {"piece" if kept.is_cut else "tensor": state_key(names[index], path)}
                for path, kept in layout.tensors.items()}
        states[names[index]] = with_data(layout.tree, keys)
    return states


def state_key(name, path):
    return f"optimizer.state.{name}.{path}"


def collect(model, optimizer, pieces, names, layouts, tensors, extra, owners, rank, to_cpu) -> dict[str, Part]:
    """-> key -> what this rank writes of that tensor."""
    def kept(value):
        value = value.detach()
        if to_cpu:  # a copy, also of what is there already
            return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
        return value.contiguous()

    owned, params, there = {key: whole(kept(value)) for key, value in extra.items()}, all_params(optimizer), []
    for name, value in state_of(model).items():
        piece = Piece(0, local(value).numel(), local(value), box_of(value).base)
        there.append((f"model.{name}", value, local(value), Kept((), value.dtype, True, owners[name]), piece))
    for index, layout in layouts.items():
        for path, its in layout.tensors.items():
            key = state_key(names[index], path)
            there.append((key, params[index], tensors.get(index, {}).get(path), its, pieces.get(index)))
    for key, param, value, its, piece in there:
        for start, stop in [(start, stop) for owner, start, stop in its.owners if owner == rank]:
            owned[key] = whole(kept(value)) if not its.is_cut else Part(
                kept(its.part(value, piece, start, stop)), its.shape(param.shape), start, cuts_of(param))
    return owned


def write(path, partial, owned, manifest, group):
    """Write what this rank owns to `partial`, then the manifest, and give the folder its name. Collective."""
    what = f"checkpoint {path} can't be written"
    rank, _ = rank_and_size(group)
    with removed_on_error(partial):
        file = partial / name_of(rank)
        with errors_on_all(what, group):
            if not partial.is_dir():
                raise FileNotFoundError(2, "the folder that rank 0 has made isn't here: all need the same folder")
            written = write_rank_file(file, owned)
        everyone = all_gather((file.name, written, manifest.get("extra")), group)
        with errors_on_all(what, group):
            if len(everyone) < manifest["ranks"]:
                raise RuntimeError("the process group was destroyed meanwhile: call result() before")
            if rank == 0:
                of_all = {"extra": [extra for *_, extra in everyone],
                          "files": {name: written for name, written, _ in everyone}}
                finish(path, partial, {"format": FORMAT, "byteorder": sys.byteorder, **manifest, **of_all})


def finish(path, partial, manifest):
    text, limit = sealed(manifest), most_bytes(len(manifest["model"]))
    if len(text) > limit:
        raise ValueError(f"its manifest has {len(text)} bytes, load() reads {limit}: put large values of `extra` or of "
                         "a state into tensors")
    with open(partial / MANIFEST, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    manifest_of(partial, limit)  # as `load` will
    sync_folder(partial)
    refuse_existing(path)  # of another run, where there are no locks
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder):
    """What is in it is there after a power failure too, on file systems that can promise that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------ asynchronous


class Saving(Future):
    """The Future of an asynchronous save."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def result(self, timeout=None):
        try:
            return super().result(timeout)
        finally:
            if self.done():
                UNTOLD.pop(self.path, None)


def write_behind(saving, write, *args):
    try:
        write(*args)
    except BaseException as error:
        UNTOLD[saving.path] = first_line(error)
        saving.set_exception(error)
    else:
        saving.set_result(None)


def tell_failures(what, group):
    """Raise, on every rank, failures of earlier saves whose futures nobody has asked. Collective."""
    with at_own_pace(what, group):
        lines = [UNTOLD.pop(path) for path in list(UNTOLD)]
    for line in filter(None, all_gather("; ".join(lines), group)):
        raise CheckpointError(line)


@atexit.register
def tell_at_the_end():
    for line in UNTOLD.values():
        print(f"error: {line}", file=sys.stderr)


def writer_of(optimizer, group):
    """-> a thread that writes one checkpoint after the other; its own process group, so that messages can't mix.

    A later process group of the same ranks, as after reshard(), gets the same, because torch never frees a group.
    """
    if not dist.is_initialized():
        return WRITERS.setdefault(optimizer, (ThreadPoolExecutor(1), None))
    training, writers = group or dist.group.WORLD, WRITERS.setdefault(dist.group.WORLD, {})
    ranks, device = dist.get_process_group_ranks(training), all_params(optimizer)[0].device
    timeout = training._get_backend(device).options._timeout
    if (*ranks, timeout) not in writers:
        is_everyone = len(ranks) == dist.get_world_size()  # if not, the others don't call this
        n_groups = all_gather(len(dist.distributed_c10d._world.pg_names), group)  # torch names the new one by that
        if not is_everyone and len(set(n_groups)) > 1:
            raise CheckpointError(f"the ranks are in {n_groups} process groups: save without asynchronous here")
        own_group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=not is_everyone)  # of CPUs
        writers[(*ranks, timeout)] = ThreadPoolExecutor(1), own_group
    return writers[(*ranks, timeout)]
