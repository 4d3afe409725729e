"""Checkpoints are written: each rank writes what it owns, and the folder has its name when everything is in it.

What is written knows neither ranks nor buckets nor padding: it loads in any stage and in a plain torch optimizer.
Source of the idea: the "universal" checkpoints of DeepSpeed and of Megatron-LM's distributed optimizer.
"""

import contextlib
import errno
import itertools
import os
import shutil
import sys
import weakref
from concurrent.futures import Future, wait
from pathlib import Path

import torch
import torch.distributed as dist

from guard.schema import Spec, described

from .asynchronous import Saving, tell_failures, write_behind, writer_of
from .boxes import box_of, cuts_of
from .errors import CheckpointError, UnfitModel
from .folder import claim, refuse_existing
from .full_state import filled
from .json_values import NotPackable, pack, pack_apart, pack_data
from .manifest import FORMAT, MANIFEST, manifest_of, most_bytes, sealed
from .model import names_of, state_of, unwrapped
from .optimizers import all_params, inner_of, itself, local, packed_groups, pieces_in_whole, ranks_of
from .rank_files import Part, name_of, whole, write_rank_file
from .ranks import all_gather, errors_on_all, rank_and_size, rank_in
from .states import agree_on_states, check_states, local_states, owners_of, with_data


def save(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: object = None,
         *, asynchronous: bool = False) -> Future[None]:
    """Write a checkpoint: a folder `path`, which appears when everything is in it. Collective; of a tensor-parallel
    model over all ranks of its mesh.

    Args:
        path: a folder that doesn't exist, where all ranks can write; until it does, there is a "….partial" beside it.
            Other runs can't save folders beside it whose names differ in the number at their end only.
        model: its parameters and buffers are saved by name, and the optimizer's state by those names; DDP and
            torch.compile add nothing to them. What is not the optimizer's is saved as the first rank has it: experts
            of another process group need another folder, in each group, and are loaded after this.
        optimizer: a DistributedOptimizer of any stage, or a torch optimizer, which must not be of DTensors.
        extra: anything more of this rank, such as random states: numbers, texts, bytes, tensors, dtypes, devices, and
            dicts, lists, tuples, sets and deques of these. What parameter groups hold must be like that too.
        asynchronous: copy everything to the CPU, and write while training goes on. One at a time: it waits for the one
            before.

    Returns a Future: `.result()` waits, and raises what went wrong; call that of the last one before
    destroy_process_group(). Where nobody does, the next save raises it, or a line says it when Python ends. Without
    `asynchronous` it is done.

    Raises:
        dist.DistError: a rank is missing, see `at_own_pace`.
        UnfitModel: on every rank, before anything is written; `optimizer` is of another model, or plain and of
            DTensors, or the model's state_dict() has copies of its tensors, or an extra state.
        FolderInUse: on every rank; another run saves there.
        CheckpointError: on every rank; `path` exists, or can't be written, or `extra`, a parameter group or a state not
            be read again: the message names the parameter and the key; or an earlier asynchronous save has failed; or
            `asynchronous`, the optimizer's ranks are not all there are, and some are in more groups than others.
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
    refuse_different_models(model, names, what, group)
    thread, own_group = writer_of(optimizer, group) if asynchronous else (None, None)
    layouts, tensors = loadable_states(optimizer, names, what, group)
    owners = owners_of_model(model, optimizer, what, group)
    partial = make_folder(path, what, rank, group)
    with removed_on_error(partial):
        with errors_on_all(what, group):
            owned = collect(model, optimizer, names, layouts, tensors, large, owners, rank, asynchronous)
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


def refuse_different_models(model, names, what, group):
    """Raise UnfitModel on every rank if those of the ranks differ. Collective."""
    tensors = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state_of(model).items()]
    ours, *others = all_gather([*tensors, ("the optimizer's parameters", names)], group)
    for rank, theirs in enumerate(others, 1):
        for one, other in itertools.zip_longest(ours, theirs):
            if one != other:
                name = (one or other)[0]
                raise UnfitModel(f"{what}: the ranks have different models: {name} isn't the same on ranks 0 and "
                                 f"{rank}")


def packed(optimizer, names, extra, rank):
    """-> groups and `extra` for the manifest; key -> tensors of `extra` for the file of this rank.

    Raises ValueError: no load could read it.
    """
    groups = []
    try:
        for group in packed_groups(optimizer):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [names[index] for index in group["params"]],
                           "options": pack(options, lambda _, value: pack_data(value))})
        return groups, *pack_apart(extra, f"extra.{rank}.", with_small=True)
    except NotPackable as refusal:
        raise ValueError(f"load() can't read `extra` or a parameter group again: {refusal}") from None


def loadable_states(optimizer, names, what, group):
    """See `agree_on_states`. Raises CheckpointError, on every rank, also where `load` would refuse them."""
    with errors_on_all(what, group):
        pieces = pieces_in_whole(optimizer)
        states = local_states(optimizer, pieces)
    layouts, tensors = agree_on_states(optimizer, states, pieces, names, what, group)
    with errors_on_all(what, group):
        found = {}
        for index, layout in layouts.items():
            shape = all_params(optimizer)[index].shape
            specs = {path: Spec(kept.shape(shape), kept.dtype) for path, kept in layout.tensors.items()}
            found[names[index]] = described(filled(layout.tree, specs.get))
        check_states(optimizer, names, found, optimizer.param_groups)
    return layouts, tensors


def make_folder(path, what, rank, group) -> Path:
    """-> where it is written until it is complete."""
    name = None
    with errors_on_all(what, group, is_named=False):
        if rank == 0:
            name = claim(path, dist.get_rank() if dist.is_initialized() else 0)
    return path.with_name(all_gather(name, group)[0])


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


def held(model, optimizer) -> dict[str, tuple[int, int]]:
    """-> name of a tensor of the model -> which elements of the whole this rank has to write, if no other does."""
    index_of = {id(param): index for index, param in enumerate(all_params(optimizer))}
    pieces, found = pieces_in_whole(optimizer), {}
    for name, tensor in state_of(model).items():
        index, box = index_of.get(id(tensor)), box_of(tensor)
        if index in pieces:
            found[name] = pieces[index].in_whole
        elif index is None or not tensor.numel():  # not the optimizer's
            found[name] = box.base, box.base + box.numel
    return found


def owners_of_model(model, optimizer, what, group) -> dict[str, list[tuple[int, int, int]]]:
    """-> name of a tensor -> (rank, start, stop) of each rank that writes elements of it. Collective.

    What several ranks have, the first one of them writes.
    """
    with errors_on_all(what, group):
        mine = held(model, optimizer)
    parts = {name: [] for name in state_of(model)}
    for rank, theirs in enumerate(all_gather(mine, group)):
        for name, elements in theirs.items():
            parts[name].append((rank, *elements))
    return {name: owners_of(those) or those[:1] for name, those in parts.items()}  # also one without elements


def collect(model, optimizer, names, layouts, tensors, extra_tensors, owners, rank, to_cpu) -> dict[str, Part]:
    """-> key -> what this rank writes of that tensor."""
    pieces, params = pieces_in_whole(optimizer), all_params(optimizer)

    def kept(value):
        value = value.detach()
        if to_cpu:  # a copy, also of what is there already
            return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
        return value.contiguous()

    owned = {key: whole(kept(value)) for key, value in extra_tensors.items()}
    for name, value in state_of(model).items():
        own, first, shape, cuts = local(value).detach().reshape(-1), box_of(value).base, tuple(value.shape), cut(value)
        for owner, start, stop in owners[name]:
            if owner == rank:
                owned[f"model.{name}"] = Part(kept(own[start - first : stop - first]), shape, start, cuts)
    for index in sorted(layouts.keys() & pieces.keys()):
        for path, its in layouts[index].tensors.items():
            for start, stop in [(start, stop) for owner, start, stop in its.owners if owner == rank]:
                value, param = tensors[index][path], params[index]
                owned[state_key(names[index], path)] = whole(kept(value)) if not its.is_cut else Part(
                    kept(its.part(value, pieces[index], start, stop)), its.shape(param.shape), start, cut(param))
    return owned


def cut(tensor):
    """How a DTensor is cut; None: it isn't."""
    cuts = cuts_of(tensor)
    return cuts if any(len(sizes) > 1 for sizes in cuts) else None


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
