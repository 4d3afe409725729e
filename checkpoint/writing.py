"""Checkpoints are written: each rank writes what it owns, and the folder has its name when everything is in it.

What is written knows neither ranks nor buckets nor padding: it loads in any stage and in a plain torch optimizer, and
torch.distributed.checkpoint's own tools read it. What they need, its pickled `.metadata`, is never read here.
Source of the idea: the "universal" checkpoints of DeepSpeed and of Megatron-LM's distributed optimizer.
"""

import atexit
import copy
import io
import json
import os
import shutil
import struct
import sys
import warnings
import weakref
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from .boxes import Shard
from .optimizers import all_params, group_of, inner_of, packed_groups, pieces_of
from .folder import claim, refuse_existing
from .full_state import filled, flat
from .manifest import FORMAT, MANIFEST, checksum, manifest_of, opened, parsed, verify_sizes
from .model import names_of, state_of, unwrapped
from .json_values import SMALL, NotPackable, pack, pack_data, tensors_in, unpack
from .ranks import CheckpointError, agree, all_gather, at_own_pace, errors_on_all, first_line
from .ranks import rank_and_size, rank_in
from .states import NotKept, agree_on_states, fitting_probes, local_states, path_of, with_data

# The group of a thread that writes is not what torch.distributed.checkpoint looks at.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

WRITERS = weakref.WeakKeyDictionary()  # the group of all ranks, or optimizer if there is none -> see `writer_of`
UNTOLD = {}  # path of an asynchronous save that failed -> why; until somebody has heard of it


def save(path, model, optimizer, extra=None, *, asynchronous=False) -> Future:
    """Write a checkpoint: a folder `path`, which appears when everything is in it. Collective.

    Args:
        path: a folder that doesn't exist, where all ranks can write; until it does, there is a "….partial" beside it.
            Other runs can't save folders beside it whose names differ in the number at their end only.
        model: its parameters and buffers are saved by name, and the optimizer's state by those names; DDP and
            torch.compile add nothing to them. What is not the optimizer's is saved as the first rank has it: experts
            of another process group need another folder, in each group, and are loaded after this.
        optimizer: a DistributedOptimizer of any stage, or a torch optimizer; not of DTensors.
        extra: anything more of this rank, such as random states: numbers, texts, bytes, tensors, dtypes, devices, and
            dicts, lists, tuples, sets and deques of these. What parameter groups hold must be like that too.
        asynchronous: copy everything to the CPU, and write while training goes on. One at a time: it waits for the one
            before.

    Returns a Future: `.result()` waits, and raises what went wrong; call that of the last one before
    destroy_process_group(). Where nobody does, the next save raises it, or a line says it when Python ends. Without
    `asynchronous` it is done.

    Raises:
        dist.DistError: a rank is missing, see `at_own_pace`.
        CheckpointError: on every rank; `path` exists, or can't be written, or another run saves there, or `extra`, a
            parameter group or a state not be read again: the message names the parameter and the key; or an earlier
            asynchronous save has failed; or `asynchronous`, the optimizer's ranks are not all there are, and some are
            in more groups than others.
        ValueError: on every rank, before anything is written; `optimizer` is of another model, or of DTensors, or the
            model's state_dict() has copies of its tensors, or an extra state.
    """
    path, group, model = Path(path), group_of(optimizer), unwrapped(model)
    names = names_of(model, optimizer)
    rank, world_size = rank_in(group)
    what = f"checkpoint {path} can't be written"
    if earlier := getattr(optimizer, "last_save", lambda: None)():
        wait([earlier])  # one at a time
    tell_failures(what, group)
    thread, own_group = writer_of(optimizer, group) if asynchronous else (None, None)
    with errors_on_all(what, group):
        parts = packed(optimizer, names, extra, rank)
    layouts, tensors = loadable_states(optimizer, names, what, group)
    partial = make_folder(path, what, rank, group)
    tree = collect(model, optimizer, names, layouts, tensors, parts, to_cpu=asynchronous)
    manifest = {"optimizer": type(inner_of(optimizer)).__name__, "ranks": world_size, "groups": parts.groups,
                "model": list(state_of(model)), "states": packed_states(names, layouts), "extra": parts.extra}
    if not asynchronous:
        future = Future()
        future.set_result(write(path, partial, tree, manifest, group))
        return future
    future = Saving(path)
    thread.submit(write_behind, future, path.absolute(), partial.absolute(), tree, manifest, own_group)
    optimizer.last_save = weakref.ref(future)  # one that failed has `tree` in its traceback
    return future


class Saving(Future):
    """Of an asynchronous save."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def result(self, timeout=None):
        try:
            return super().result(timeout)
        finally:
            if self.done():
                UNTOLD.pop(self.path, None)


def write_behind(saving, *args):
    try:
        write(*args)
    except BaseException as error:
        UNTOLD[saving.path] = first_line(error)
        saving.set_exception(error)
    else:
        saving.set_result(None)


def tell_failures(what, group):
    """Raise, on every rank, what nobody has asked the futures of earlier saves for. Collective."""
    with at_own_pace(what, group):
        lines = [UNTOLD.pop(path) for path in list(UNTOLD)]
    for line in filter(None, all_gather("; ".join(lines), group)):
        raise CheckpointError(line)


@atexit.register
def tell_at_the_end():
    for line in UNTOLD.values():
        print(f"error: {line}", file=sys.stderr)


def loadable_states(optimizer, names, what, group):
    """See `agree_on_states`. Raises CheckpointError, on every rank, also where `load` would refuse them."""
    pieces = pieces_of(optimizer)
    try:
        layouts, tensors = agree_on_states(optimizer, local_states(optimizer, pieces), pieces, names, group)
        keys = {names[index]: list(unpack(layout.tree, lambda *_: None)) for index, layout in layouts.items()}
        fitting_probes(optimizer, names, keys, optimizer.param_groups)
    except (NotKept, ValueError) as refusal:
        raise CheckpointError(f"{what}: {refusal}") from None
    return layouts, tensors


class Packed(NamedTuple):
    """What is saved beside the model and the state."""

    groups: list  # for the manifest
    named_groups: list  # the same for torch's tools
    extra: object  # packed
    tensors: dict  # path -> those of extra that are not in it


def packed(optimizer, names, extra, rank) -> Packed:
    """Raises ValueError: no load could read it."""
    groups = copy.deepcopy(packed_groups(optimizer))
    large = {}

    def tensor(path, value):
        if value.numel() <= SMALL:
            return pack_data(value)
        if path_of(path) in large:
            raise NotPackable(value, path, "two of its keys read alike")
        large[path_of(path)] = value
        return {"tensor": f"extra.{rank}.{path_of(path)}"}

    try:
        for group in groups:
            group.pop("param_names", None)
            group["params"] = [names[index] for index in group["params"]]
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        packed_options = [pack(its, lambda _, value: pack_data(value)) for its in options]
        packed_extra = pack(extra, tensor)
    except NotPackable as refusal:
        raise ValueError(f"load() can't read `extra` or a parameter group again: {refusal}") from None
    for_manifest = [{"params": group["params"], "options": its} for group, its in zip(groups, packed_options)]
    return Packed(for_manifest, groups, packed_extra, large)


def make_folder(path, what, rank, group) -> Path:
    """-> where it is written until it is complete."""
    name = error = None
    with at_own_pace(what, group):  # there may be much to remove
        if rank == 0:
            try:
                name = claim(path, dist.get_rank() if dist.is_initialized() else 0)
            except OSError as refusal:
                error = refusal.strerror
    name, error = all_gather((name, error), group)[0]
    agree(error, what, group)  # only rank 0 can have one: all raise it, in its words
    return path.with_name(name)


def writer_of(optimizer, group):
    """-> a thread that writes one checkpoint after the other, and its group: what two threads send must not mix.

    The next process group of the same ranks, as after reshard(), has the same: torch keeps each group to the end.
    """
    device, own_group, ranks, timeout = all_params(optimizer)[0].device, None, (), None
    if dist.is_initialized():
        training = group or dist.group.WORLD
        ranks, timeout = dist.get_process_group_ranks(training), training._get_backend(device).options._timeout
    writers = WRITERS.setdefault(dist.group.WORLD if dist.is_initialized() else optimizer, {})
    key = tuple(ranks), timeout
    if key not in writers:
        if dist.is_initialized():  # gloo, since everything is on the CPU
            is_everyone = len(ranks) == dist.get_world_size()  # if not, the others don't call this, and ...
            n_groups = all_gather(len(dist.distributed_c10d._world.pg_names), group)  # ... torch names it after these
            if not is_everyone and len(set(n_groups)) > 1:
                raise CheckpointError(f"the ranks are in {n_groups} process groups: save without asynchronous here")
            own_group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=not is_everyone)
        # A thread begins with GPU 0, for torch.distributed.checkpoint too.
        set_device = torch.cuda.set_device if device.type == "cuda" else lambda _: None
        writers[key] = ThreadPoolExecutor(1, initializer=set_device, initargs=(device,)), own_group
    return writers[key]


def packed_states(names, layouts) -> dict:
    """-> name of a parameter -> its state, in which each tensor is the key of one in the files, or has its data."""
    states = {}
    for index, layout in layouts.items():
        keys = {path: {"piece" if path in layout.cut else "tensor": state_key(names[index], path)}
                for path in (*layout.cut, *layout.common)}
        states[names[index]] = with_data(layout.tree, keys)
    return states


def state_key(name, path):
    return f"optimizer.state.{name}.{path}"


def collect(model, optimizer, names, layouts, tensors, parts, to_cpu) -> dict:
    """What this rank writes, in the layout of torch's get_state_dict."""
    params, pieces = all_params(optimizer), pieces_of(optimizer)
    index_of = {id(param): index for index, param in enumerate(params)}

    def kept(value):
        value = value.detach()
        if to_cpu:  # a copy, also of what is there already
            return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
        return value.contiguous()

    tree = {"model": {}, "optimizer": {"state": {}, "param_groups": parts.named_groups}, "extra": {}}
    for name, value in state_of(model).items():
        index = index_of.get(id(value))
        if index in pieces:
            start, stop, _ = pieces[index]
            tree["model"][name] = Shard(kept(value.detach().reshape(-1)[start:stop]), value.shape, start)
        elif index is None or not value.numel():  # not the optimizer's
            tree["model"][name] = kept(value)
    for index, layout in layouts.items():
        if index in pieces:
            own, start, shape = tensors[index], pieces[index].start, params[index].shape
            leaves = {path: Shard(kept(flat(own[path], lead)), shape, start) for path, (lead, _) in layout.cut.items()}
            leaves |= {path: kept(own[path]) for path in layout.common if path in own}
            tree["optimizer"]["state"][names[index]] = for_torchs_tools(layout.tree, leaves)
    rank, _ = rank_and_size(group_of(optimizer))
    if parts.tensors:
        tree["extra"][str(rank)] = {path: kept(value) for path, value in parts.tensors.items()}
    return tree


def for_torchs_tools(packed_value, leaves):
    """A packed state with its tensors, and dicts in place of other containers: their keys are then our paths."""
    if isinstance(packed_value, list) and tensors_in(packed_value):
        return {str(i): for_torchs_tools(item, leaves) for i, item in enumerate(packed_value)}
    if isinstance(packed_value, dict):
        ((name, what),) = packed_value.items()
        if name in ("dict", "ordered"):
            return {str(unpack(key, None)): for_torchs_tools(item, leaves) for key, item in what}
        if name == "tensor":
            return leaves[what]
        if name != "data" and tensors_in(packed_value):
            return for_torchs_tools(what[1] if name == "deque" else what, leaves)
    return filled(packed_value, None)


class Writer(dcp.FileSystemWriter):
    """Keeps where this rank has put what, and which rank was missing then."""

    def __init__(self, path, what, group):
        super().__init__(path)
        self.what, self.group, self.missing = what, group, None

    def write_data(self, plan, planner):
        try:
            with at_own_pace(self.what, self.group):
                future = super().write_data(plan, planner)
                self.results = future.wait()
                return future
        except dist.DistError as error:
            self.missing = error
            raise
        except Exception as error:
            raise cause_of(error) from None


def cause_of(error):
    """What the disk said: torch.save raises something else after that."""
    found = error
    while found and not isinstance(found, OSError):
        found = found.__context__
    return found or error


def write(path, partial, tree, manifest, group):
    """Write `tree` to `partial`, then the manifest, and give the folder its name. Collective over `group`."""
    what = f"checkpoint {path} can't be written"
    rank, _ = rank_and_size(group)
    try:
        results = write_files(partial, tree, what, rank, group)
        with errors_on_all(what, group):
            own = [".metadata"] * (rank == 0) + [file.name for file in partial.glob(f"__{rank}_*")]
            stored = stored_by(results, tree, partial, wanted_keys(manifest))
            mine = {name: checksum(partial / name) for name in own}, stored, manifest.get("extra")
        everyone = all_gather(mine, group)
        with errors_on_all(what, group):
            if len(everyone) < manifest["ranks"]:
                raise RuntimeError("the process group was destroyed meanwhile: call result() before")
            if rank == 0:
                finish(path, partial, complete_manifest(manifest, everyone))
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_files(partial, tree, what, rank, group) -> list:
    """-> where torch.distributed.checkpoint has put what this rank has written."""
    writer = Writer(partial, what, group)
    try:
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # of what all have, such as buffers
        no_dist = not dist.is_initialized()
        dcp.save(tree, storage_writer=writer, planner=planner, process_group=group, no_dist=no_dist)
    except (RuntimeError, dcp.api.CheckpointException) as failure:
        if writer.missing or isinstance(failure, RuntimeError):
            raise writer.missing or failure from None
        raise_interrupt(failure, rank)
        raise CheckpointError(f"{what}: rank {next(iter(failure.failures))}: {first_line(failure)}") from None
    return writer.results


def wanted_keys(manifest) -> set:
    """Keys of the tensors that this rank's part of the manifest speaks of."""
    packed_values = [*manifest.get("states", {}).values(), manifest.get("extra")]
    keys = {what for value in packed_values for name, what in tensors_in(value) if name != "data"}
    return keys | {f"model.{name}" for name in manifest.get("model", ())}


def stored_by(results, tree, partial, wanted) -> dict:
    """-> key -> what the manifest says of a tensor, with the ranges that this rank has written."""
    tensors, stored = flatten_state_dict(tree)[0], {}
    for key in wanted & tensors.keys():
        tensor = tensors[key]
        stored[key] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
                       "n_lead": getattr(tensor, "n_lead", 0), "ranges": []}
    for result in results:
        tensor, place = tensors.get(result.index.fqn), result.storage_data
        if result.index.fqn in stored and tensor.numel():
            whole = 0, tensor.numel()
            start, stop = tensor.ranges[result.index.offset] if isinstance(tensor, Shard) else whole
            offset = offset_of_data(partial, place, item_bytes(tensor, result.index.offset))
            stored[result.index.fqn]["ranges"].append([start, stop, place.relative_path, offset])
    return stored


class Slice(io.RawIOBase):
    """Some bytes of an open file as a file of their own."""

    def __init__(self, file, offset, length):
        self.file, self.offset, self.length, self.place = file, offset, length, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, place, whence=os.SEEK_SET):
        self.place = place + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.length}[whence]
        return self.place

    def readinto(self, buffer):
        n_bytes = max(0, min(len(buffer), self.length - self.place))
        self.file.seek(self.offset + self.place)
        n_read = self.file.readinto(memoryview(buffer)[:n_bytes])
        self.place += n_read
        return n_read


def item_bytes(tensor, offset) -> int:
    return tensor.parts[offset].nbytes if isinstance(tensor, Shard) else tensor.nbytes


def offset_of_data(folder, place, n_bytes) -> int:
    """Where in a file a tensor's bytes are, that torch.save has written as a zip archive at a `place`."""
    with opened(folder, place.relative_path) as file:
        part = Slice(file, place.offset, place.length)
        with zipfile.ZipFile(part) as archive:
            (entry,) = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
        if (entry.compress_type, entry.file_size) != (zipfile.ZIP_STORED, n_bytes):
            raise ValueError(f"{place.relative_path} has {entry.file_size} bytes in place of {n_bytes}")
        part.seek(entry.header_offset + 26)  # of the local header, which has 30 bytes, a name and something more
        n_name, n_more = struct.unpack("<HH", part.read(4))
        return place.offset + entry.header_offset + 30 + n_name + n_more


def complete_manifest(manifest, everyone) -> str:
    """-> its text, from the parts of all ranks: files, tensors, extra. Raises ValueError: `load` could not read it."""
    files, tensors = {}, {}
    for their_files, stored, _ in everyone:
        files.update(their_files)
        for key, what in stored.items():
            tensors.setdefault(key, {**what, "ranges": []})["ranges"] += what["ranges"]
    for what in tensors.values():
        what["ranges"].sort()
    whole = {"format": FORMAT, "byteorder": sys.byteorder, **manifest, "extra": [extra for *_, extra in everyone],
             "files": files, "tensors": tensors}
    text = json.dumps(whole)
    parsed(text)
    return text


def finish(path, partial, text):
    for name in json.loads(text)["files"]:
        if not (partial / name).exists():
            raise FileNotFoundError(2, f"{name}, of another rank, isn't here: all need the same folder")
    with open(partial / MANIFEST, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    verify_sizes(partial, manifest_of(partial)[0])  # as `load` will
    sync_folder(partial)
    refuse_existing(path)  # of another run, where there are no locks
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder):
    """What is in it is there after a power failure too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def raise_interrupt(failure, rank):
    """Ctrl-C stays what it is, on the rank that it came to: torch.distributed.checkpoint wraps that too."""
    error, _ = failure.failures.get(rank, (None, None))
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error from None
