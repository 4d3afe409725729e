"""Checkpoints in files: each rank writes what it owns, and reads what it needs, all of it before anything changes.

What is written knows neither ranks nor buckets nor padding: it loads in any stage and in a plain torch optimizer. No
file is unpickled: the manifest is JSON, and tensors are bytes. Source of the idea: the "universal" checkpoints of
DeepSpeed and of Megatron-LM's distributed optimizer.
"""

import atexit
import contextlib
import errno
import itertools
import os
import re
import shutil
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .boxes import box_of, cuts_of, local
from .errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint, UnfitModel
from .folder import claim, refuse_existing
from .json_values import DTYPES, SMALL, NotPackable, pack, pack_apart, pack_data, unpack
from .manifest import FORMAT, MANIFEST, manifest_of, most_bytes, sealed
from .optimizers import all_params, inner_of, install, itself, packed_groups, pieces_of, prepared, ranks_of, whole_piece
from .rank_files import Part, Reader, whole, write_rank_file
from .ranks import all_gather, at_own_pace, errors_on_all, first_line, group_among, rank_and_size, rank_in
from .states import agree, check_states, fixed_paths, local_states, schemas_of, state_key

DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # of a disk that can't read what it has
WRITERS = weakref.WeakKeyDictionary()  # process group, or optimizer if there is none -> the thread that writes
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
        dist.DistError: a rank is missing.
        UnfitModel: `optimizer` is of another model, or the model's state_dict() has copies, or an extra state.
        FolderInUse: another run saves there.
        CheckpointError: `path` exists or can't be written, something can't be read again, an earlier save has failed.
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
        groups, (packed_extra, owned) = packed(optimizer, names, extra, rank)
        pieces = pieces_of(optimizer, in_whole=True)
        states = local_states(optimizer, pieces)
        things = {state_key(names[index]): (state, pieces[index]) for index, state in states.items()}
        things.update(parts_of_model(model, optimizer, pieces))
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state_of(model).items()}
    refuse_different_models(all_gather({**shapes, "the optimizer's parameters": names}, group), what)
    thread, own_group = writer_of(optimizer, group) if asynchronous else (None, None)
    layouts, tensors = agree(optimizer, things, names, what, group)
    partial = None
    with errors_on_all(what, group):  # where `load` would refuse the states
        check_states(schemas_of(optimizer), names, states, {index: piece.main.shape for index, piece in pieces.items()})
    with errors_on_all(what, group, is_named=False):
        if rank == 0:
            partial = claim(path, dist.get_rank() if dist.is_initialized() else 0)
    partial = path.with_name(all_gather(partial, group)[0])  # it is written there until it is complete
    with removed_on_error(partial):
        with errors_on_all(what, group):
            owned = collect(things, layouts, tensors, owned, rank, asynchronous)
            states = {name: layouts[state_key(name)].tree for name in names if state_key(name) in layouts}
            manifest = {"optimizer": type(inner_of(optimizer)).__name__, "ranks": world_size, "groups": groups,
                        "model": list(shapes), "states": states, "extra": packed_extra}
    if not asynchronous:
        future = Future()
        future.set_result(write(path, partial, owned, manifest, group))
        return future
    future = Saving()
    future.path = path
    thread.submit(write_behind, future, write, path.absolute(), partial.absolute(), owned, manifest, own_group)
    optimizer.last_save = weakref.ref(future)  # one that failed has `owned` in its traceback
    return future


def unwrapped(model):
    while isinstance(model, torch.nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def state_of(model) -> dict:
    """model.state_dict() with the tensors themselves, by names that torch.compile hasn't changed."""
    state = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = state.get(name.replace("_orig_mod.", ""), tensor)
        if value is not tensor and not (isinstance(value, torch.Tensor) and value.data_ptr() == tensor.data_ptr()):
            raise UnfitModel(f"model.state_dict() has a copy of {name}, made by a hook say: it could not be loaded")
    return state


def names_of(model, optimizer) -> list[str]:
    """The names that the parameters have in `state_of`, by index."""
    name_of = {}
    for name, value in state_of(model).items():
        if name.endswith("_extra_state"):
            raise UnfitModel(f"{name}, of a module's get_extra_state(), isn't kept here: pass it as `extra`")
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise UnfitModel(f"{name} in model.state_dict() is a {kind}, and no tensor: pass it as `extra`")
        if value.layout != torch.strided or value.dtype not in DTYPES.values():
            raise UnfitModel(f"{name} in model.state_dict() is {value.layout} of {value.dtype}, which isn't kept here")
        cuts_of(value, name)  # or the error that says how it can't be cut
        name_of.setdefault(id(value), name)  # the first of tied ones
    names = [name_of.get(id(param)) for param in all_params(optimizer)]
    if None in names:
        raise UnfitModel(f"parameter {names.index(None)} of the optimizer isn't in model.state_dict(): pass the model "
                         "it trains")
    return names


def packed(optimizer, names, extra, rank):
    """-> groups for the manifest; `extra` for it, and its tensors by key. Raises ValueError: no load could read it."""
    groups = []
    try:
        for group in packed_groups(optimizer):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [names[index] for index in group["params"]], "options": pack(options, pack_data)})
        return groups, pack_apart(extra, f"extra.{rank}.", SMALL)
    except NotPackable as refusal:
        raise ValueError(f"load() can't read `extra` or a parameter group again: {refusal}") from None


def parts_of_model(model, optimizer, pieces):
    """-> key of a tensor of the model -> elements that this rank has to write, if no other does; their piece."""
    index_of, found = {id(param): index for index, param in enumerate(all_params(optimizer))}, {}
    for name, tensor in state_of(model).items():
        index = index_of.get(id(tensor))
        if index in pieces or index is None or not tensor.numel():  # else it is updated elsewhere
            piece = pieces.get(index) or whole_piece(tensor)._replace(base=box_of(tensor).base)
            value = local(tensor).reshape(-1)[piece.start : piece.stop]
            found[f"model.{name}"] = value, piece._replace(param=tensor, main=value)
    return found


def refuse_different_models(everyone, what):
    for rank, theirs in enumerate(everyone):
        for one, other in itertools.zip_longest(everyone[0].items(), theirs.items(), fillvalue=("", None)):
            if one != other:
                raise UnfitModel(f"{what}: the ranks have different models: {one[0] or other[0]} isn't the same on "
                                 f"ranks 0 and {rank}")


@contextlib.contextmanager
def removed_on_error(partial):
    """But not when a rank is missing: it may be writing there."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def collect(things, layouts, tensors, extra, rank, to_cpu) -> dict[str, Part]:
    """-> key -> what this rank writes of that tensor."""
    def kept(value):
        value = value.detach()
        if to_cpu:  # a copy, also of what is there already
            return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
        return value.contiguous()

    owned = {key: whole(kept(value)) for key, value in extra.items()}
    for of, layout in layouts.items():
        for key, its in layout.tensors.items():
            for start, stop in [(start, stop) for owner, start, stop in its.owners if owner == rank]:
                _, piece = things[of]
                owned[key] = whole(kept(tensors[key])) if not its.is_cut else Part(
                    kept(its.part(tensors[key], piece, start, stop)), its.shape(piece.param.shape), start,
                    cuts_of(piece.param))
    return owned


def write(path, partial, owned, manifest, group):
    """Write what this rank owns to `partial`, then the manifest, and give the folder its name. Collective."""
    what = f"checkpoint {path} can't be written"
    rank, _ = rank_and_size(group)
    with removed_on_error(partial):
        file = partial / f"rank-{rank:05}.safetensors"
        with errors_on_all(what, group):
            if not partial.is_dir():
                words = "the folder that rank 0 has made isn't here: all need the same folder"
                raise FileNotFoundError(errno.ENOENT, words)
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


class Saving(Future):
    """The Future of an asynchronous save to `path`."""

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
    """-> a thread that writes one checkpoint after the other; its own process group, so that messages can't mix."""
    own_group = None
    if dist.is_initialized():
        training = group or dist.group.WORLD
        timeout = training._get_backend(all_params(optimizer)[0].device).options._timeout
        own_group = group_among(dist.get_process_group_ranks(training), timeout=timeout, backend="gloo")  # of CPUs
    return WRITERS.setdefault(own_group or optimizer, ThreadPoolExecutor(1)), own_group


@torch.no_grad()
def load(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Read a checkpoint into `model` and `optimizer`, each rank what it needs. Collective. -> `extra` as it was saved.

    On another number of ranks than it was saved on, `extra` is that of rank 0. Its tensors are on the CPU. Everything
    is read before anything is changed: for that moment each rank has the model a second time, on the CPU.

    Raises, on every rank, before anything is changed:
        DamagedCheckpoint: it is damaged, or not complete, or the disk can't read it.
        ForeignCheckpoint: it is of another model or optimizer.
        CheckpointError: anything else.
    """
    optimizer = itself(optimizer)
    group, what = ranks_of(optimizer), f"checkpoint {path} can't be loaded"
    rank, world_size = rank_in(group)
    with errors_on_all(what, group), refusals():
        path, model = Path(path), unwrapped(model)
        names, pieces = names_of(model, optimizer), pieces_of(optimizer)
        manifest, checksum_of_text = manifest_of(path, most_bytes(len(state_of(model))))
        groups = [unpack(group["options"], None) for group in manifest.groups]  # data, as has been checked
        check(manifest, model, optimizer, names)
        schemas = schemas_of(optimizer, groups)
    if len(set(all_gather(checksum_of_text, group))) > 1:
        raise CheckpointError(f"{what}: the ranks read different checkpoints")
    with errors_on_all(what, group), refusals():
        reader = Reader(path, manifest, rank, world_size)
        found = {}
        for name, tensor in state_of(model).items():
            if id(tensor) not in found:  # tied ones once, by the first of their names
                found[id(tensor)] = local(tensor), room_for(reader, name, tensor)
        states = {index: state_of_piece(reader, manifest, names[index], piece, fixed_paths(schemas[index]))
                  for index, piece in pieces.items()}
        extra = reader.unpack(manifest.extra[rank if manifest.ranks == world_size else 0])
        check_states(schemas, names, states, {index: piece.main.shape for index, piece in pieces.items()})
        reader.run()
        ready = prepared(optimizer, states, groups)
    with errors_on_all(what, group):
        for tensor, value in found.values():
            tensor.copy_(value)
        install(optimizer, ready)
    return extra


@contextlib.contextmanager
def refusals():
    """What doesn't fit is foreign; what the disk can't read is damaged."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as refusal:
        raise ForeignCheckpoint(str(refusal)) from None
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise DamagedCheckpoint(error.strerror) from None
        raise


def check(manifest, model, optimizer, names):
    """Raise ForeignCheckpoint with the first difference, if it is of another model or optimizer."""
    here = type(inner_of(optimizer)).__name__
    if manifest.optimizer != here:
        raise ForeignCheckpoint(f"it is of {manifest.optimizer}, this optimizer is {here}")
    ours, theirs = state_of(model), {name: manifest.tensors[f"model.{name}"] for name in manifest.model}
    for name in [*ours, *theirs]:
        there, inside = (f"has it with shape {tuple(one[name].shape)}" if name in one else "doesn't have it"
                         for one in (theirs, ours))
        if there != inside:
            raise ForeignCheckpoint(f"it is of another model: {name}: the checkpoint {there}, the model {inside}")
        there, inside = theirs[name].dtype, ours[name].dtype
        if there != inside and not (there.is_floating_point and inside.is_floating_point):
            raise ForeignCheckpoint(f"it is of another model: {name} is {there} there, {inside} in the model")
    groups = [[names[index] for index in group["params"]] for group in packed_groups(optimizer)]
    theirs = [group["params"] for group in manifest.groups]
    if theirs != groups:
        raise ForeignCheckpoint(f"its parameter groups are {summary(theirs)}, this optimizer's {summary(groups)}")


def summary(groups):
    return " and ".join(f"{len(names)} from {names[0]} to {names[-1]}" if names else "an empty one" for names in groups)


def room_for(reader, name, tensor):
    """-> memory for what becomes `tensor`, or its local part, of the model."""
    # If the dtype has changed, the main parameter is read instead, so that it is rounded only once.
    stored = reader.tensors[f"model.{name}"]
    main = reader.tensors.get(f"{state_key(name)}main_param")  # in fp32, if the parameter had 16 bits when it was saved
    has_main = main and tensor.dtype != stored.dtype and (main.shape, main.n_lead) == (stored.shape, stored.n_lead)
    return reader.box(main if has_main else stored, box_of(tensor))


def state_of_piece(reader, manifest, name, piece, fixed):
    """-> the state of `piece`, not yet filled. `fixed`: entries that don't follow the parameter's shape."""
    def tensor(word, key):
        if word == "tensor" or key.removeprefix(state_key(name)) in fixed:
            return reader.whole(key)
        stored = reader.tensors[key]
        part = reader.part(stored, box_of(piece.param), piece.start, piece.stop)
        return part.view((*stored.lead, *piece.main.shape))

    state = unpack(manifest.states.get(name, {"dict": []}), tensor)
    if piece.has_main_param and "main_param" not in state:
        state["main_param"] = tensor("piece", f"model.{name}")
    return state


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """-> the complete checkpoint in `folder` with the highest number at the end of its name; None if there is none.
    Names without such a number, such as best, don't count, nor do checkpoints that were set aside."""
    complete = [path.parent for path in Path(folder).glob(f"*/{MANIFEST}") if path.is_file()
                and re.search(r"\d$", path.parent.name) and not re.search(r"\.aside-\d+$", path.parent.name)]
    return max(complete, key=lambda path: (int(re.search(r"\d+$", path.name)[0]), path.name), default=None)
