"""Checkpoints as files: each rank writes what it owns, and any number of ranks reads what it needs.

What is written knows neither ranks nor buckets nor padding: it loads in any
stage and in a plain torch optimizer, and torch.distributed.checkpoint's own tools read it.
Source of the idea: the "universal" checkpoints of DeepSpeed and of Megatron-LM's distributed optimizer.
"""

import io
import json
import os
import pickle
import re
import shutil
import warnings
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from .boxes import Shard
from .face import all_params, expected_of_saved, group_of, inner_of, install, packed_groups, pieces_of, states_of
from .face import steps_ranges
from .ranks import CheckpointError, agree, all_gather, rank_and_size

# Each rank reads for itself, which torch.distributed.checkpoint finds worth a warning.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

MANIFEST = "manifest.json"  # what a checkpoint is of, and the sizes and checksums of its files
WRITERS = weakref.WeakKeyDictionary()  # process group, or optimizer if there is none -> see `writer_of`


def save(path, model, optimizer, extra=None, *, asynchronous=False) -> Future:
    """Write a checkpoint: a folder `path`, which appears when everything is in it. Collective.

    Args:
        path: a folder that doesn't exist, where all ranks can write; until it does, there is one with ".partial" more.
        model: its parameters and buffers are saved by name, and the optimizer's state by those names; DDP and
            torch.compile add nothing to them. What is not the optimizer's is saved as the first rank has it: experts
            of another process group need another folder, in each group, and are loaded after this.
        optimizer: a DistributedOptimizer of any stage, or a torch optimizer; not of DTensors.
        extra: anything more of this rank that torch.load(weights_only=True) can read, such as random states. What
            parameter groups hold must be like that too.
        asynchronous: copy everything to the CPU, and write while training goes on. One at a time: it waits for the one
            before.

    Returns a Future: `.result()` waits, and raises what went wrong; call that of the last one before
    destroy_process_group(). Without `asynchronous` it is done.

    Raises:
        CheckpointError: on every rank; `path` exists, or can't be written, or `extra` or a parameter group not be read
            again; or `asynchronous`, the optimizer's ranks are not all there are, and some are in more groups than
            others.
        ValueError: on every rank, before anything is written; `optimizer` is of another model, or of DTensors, or the
            model's state_dict() has copies of its tensors, or an extra state.
    """
    path, group, model = Path(path), group_of(optimizer), unwrapped(model)
    names = names_of(model, optimizer)
    rank, world_size = rank_in(group)
    partial, what = path.with_name(path.name + ".partial"), f"checkpoint {path} can't be written"
    if earlier := getattr(optimizer, "last_save", lambda: None)():
        wait([earlier])  # it may be writing to `partial`
    thread, own_group = writer_of(optimizer, group) if asynchronous else (None, None)
    error = None
    try:
        extra, groups = read_again((extra, packed_groups(optimizer)))
    except Exception as refusal:  # whatever pickle raises
        error = f"torch.load(weights_only=True) can't read `extra` or a parameter group again: {first_line(refusal)}"
    agree(error, what, group)
    if rank == 0:
        try:
            if path.exists():
                raise FileExistsError(17, "it exists already")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as refusal:
            error = refusal.strerror
    agree(all_gather(error, group)[0], what, group)  # only rank 0 can have one: all raise it, in its words
    tree, manifest = collect(model, optimizer, names, groups, extra, rank, to_cpu=asynchronous)
    manifest["ranks"] = world_size
    if not asynchronous:
        future = Future()
        future.set_result(write(path, partial, tree, manifest, group))
        return future
    future = thread.submit(write, path.absolute(), partial.absolute(), tree, manifest, own_group)
    optimizer.last_save = weakref.ref(future)  # one that failed has `tree` in its traceback
    return future


def writer_of(optimizer, group):
    """-> a thread that writes one checkpoint after the other, and its group: what two threads send must not mix."""
    key = optimizer if not dist.is_initialized() else group or dist.group.WORLD
    if key not in WRITERS:
        device, own_group = all_params(optimizer)[0].device, None
        if dist.is_initialized():  # gloo, since everything is on the CPU
            ranks = dist.get_process_group_ranks(key)
            is_everyone = len(ranks) == dist.get_world_size()  # if not, the others don't call this, and ...
            n_groups = all_gather(len(dist.distributed_c10d._world.pg_names), group)  # ... torch names it after these
            if not is_everyone and len(set(n_groups)) > 1:
                raise CheckpointError(f"the ranks are in {n_groups} process groups: save without asynchronous here")
            timeout = key._get_backend(device).options._timeout
            own_group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=not is_everyone)
        # A thread begins with GPU 0, for torch.distributed.checkpoint too.
        set_device = torch.cuda.set_device if device.type == "cuda" else lambda _: None
        WRITERS[key] = ThreadPoolExecutor(1, initializer=set_device, initargs=(device,)), own_group
    return WRITERS[key]


def read_again(what):
    """A copy of `what`, made as `load` will make it."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def collect(model, optimizer, names, groups, extra, rank, to_cpu):
    """What this rank writes, in the layout of torch's get_state_dict -> (tree, manifest without the files)."""
    pieces, params = pieces_of(optimizer), all_params(optimizer)
    index_of = {id(param): index for index, param in enumerate(params)}

    def kept(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to("cpu", copy=True) if to_cpu else value.detach()

    tree = {"model": {}, "optimizer": {"state": {}, "param_groups": groups}, "extra": {}}
    for name, value in state_of(model).items():
        index = index_of.get(id(value))
        if index in pieces:
            start, stop, _ = pieces[index]
            tree["model"][name] = Shard(kept(value.reshape(-1)[start:stop]), value.shape, start)
        elif index is None or not value.numel():
            tree["model"][name] = kept(value)
    for index, (cut, common) in states_of(optimizer, pieces).items():
        shape, start = params[index].shape, pieces[index].start
        state = {key: Shard(kept(part), shape, start) for key, part in cut.items()}
        tree["optimizer"]["state"][names[index]] = state | {key: kept(value) for key, value in common.items()}
    for group in groups:
        group.pop("param_names", None)
        group["params"] = [names[index] for index in group["params"]]
    tree["extra"][str(rank)] = (extra,)  # a tuple: torch.distributed.checkpoint looks for tensors in lists and dicts
    manifest = {"optimizer": type(inner_of(optimizer)).__name__, "groups": [group["params"] for group in groups]}
    return tree, manifest


def unwrapped(model):
    while isinstance(model, torch.nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def bare(name):
    return name.replace("_orig_mod.", "")  # of a layer that is compiled


def state_of(model) -> dict:
    """model.state_dict() with the tensors themselves, by names that torch.compile hasn't changed."""
    state = {bare(name): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = state.get(bare(name), tensor)
        if value is not tensor and not (isinstance(value, torch.Tensor) and value.data_ptr() == tensor.data_ptr()):
            raise ValueError(f"model.state_dict() has a copy of {name}, made by a hook say: it could not be loaded")
    return state


def names_of(model, optimizer) -> list[str]:
    """The names that the parameters have in `state_of`, by index."""
    name_of = {}
    for name, param in [*state_of(model).items(), *model.named_parameters()]:
        if name.endswith("_extra_state"):
            raise ValueError(f"{name}, of a module's get_extra_state(), isn't kept here: pass it as `extra`")
        name_of.setdefault(id(param), bare(name))  # the first of tied ones
    for index, param in enumerate(all_params(optimizer)):
        name = name_of.get(id(param))
        if name is None:
            raise ValueError(f"parameter {index} of the optimizer is not one of the model's: pass the model it trains")
        if hasattr(param, "device_mesh"):
            raise ValueError(f"parameter {name} is a DTensor: save model.state_dict() and full_state_dict()")
    return [name_of[id(param)] for param in all_params(optimizer)]


def write(path, partial, tree, manifest, group):
    """Write `tree` to `partial`, then the manifest, and give the folder its name. Collective over `group`."""
    what = f"checkpoint {path} can't be written"
    rank, _ = rank_and_size(group)
    try:
        no_dist = not dist.is_initialized()
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # of what all have, such as buffers
        writer = dcp.FileSystemWriter(partial)
        dcp.save(tree, storage_writer=writer, planner=planner, process_group=group, no_dist=no_dist)
    except dcp.api.CheckpointException as failure:
        shutil.rmtree(partial, ignore_errors=True)
        raise_interrupt(failure, rank)
        raise CheckpointError(f"{what}: rank {next(iter(failure.failures))}: {first_line(failure)}") from None
    error, files = None, {}
    try:
        own = [partial / ".metadata"] * (rank == 0) + list(partial.glob(f"__{rank}_*"))
        files = {file.name: checksum(file) for file in own}
    except OSError as refusal:
        error = refusal.strerror
    everyone = all_gather((error, files), group)
    for their_error, theirs in everyone:
        error = error or their_error
        files.update(theirs)
    if len(everyone) < manifest["ranks"]:
        error = "the process group was destroyed meanwhile: call result() before"
    if rank == 0 and error is None:
        try:
            for name in files:
                if not (partial / name).exists():
                    raise FileNotFoundError(2, f"{name}, of another rank, isn't here: all need the same folder")
            with open(partial / MANIFEST, "w") as file:
                json.dump({**manifest, "files": files}, file)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError as refusal:
            error = refusal.strerror
    agree(error, what, group)


def load(path, model, optimizer):
    """Read a checkpoint into `model` and `optimizer`, each rank what it needs. Collective. -> `extra` as it was saved.

    On another number of ranks than it was saved on, `extra` is that of rank 0. No code from a file is ever run.

    Raises:
        CheckpointError: on every rank, before anything is changed: it is not complete, damaged, or of another model. A
            file that can't be read to its end, though it could a moment before, leaves part of it in the model.
        ValueError: as `save`.
    """
    path, group, model = Path(path), group_of(optimizer), unwrapped(model)
    rank, world_size = rank_in(group)
    what, error = f"checkpoint {path} can't be loaded", None
    pieces, params, names = pieces_of(optimizer), all_params(optimizer), names_of(model, optimizer)
    try:
        manifest = verified(path, rank, world_size)
        found = Reader(path).read_metadata()
        metadata, stored = found.state_dict_metadata, stored_states(found.state_dict_metadata)
        check(manifest, metadata, model, optimizer, names)
    except Exception as refusal:  # whatever a damaged pickle raises, on the ranks that read it before its checksum
        error = first_line(refusal)
    agree(error, what, group)
    if len(set(all_gather(zlib.crc32(json.dumps(manifest).encode()), group))) > 1:
        raise CheckpointError(f"{what}: the ranks read different checkpoints")
    shared = [key for key in metadata if key.startswith("optimizer.param_groups.")]
    extra = f"extra.{rank if manifest['ranks'] == world_size else 0}"
    values = {key: blank(metadata[key]) for key in [*shared, extra]}
    agree(read(path, values), what, group)  # what may not be read is here
    try:
        paths = {key: found.planner_data[key] for key in shared}  # torch.distributed.checkpoint flattens dicts in them
        tree = dcp._nested_dict.unflatten_state_dict({key: values[key] for key in shared}, paths)
        groups = tree["optimizer"]["param_groups"]
        expected = expected_of_saved(optimizer, names, stored, groups) if steps_ranges(optimizer) else None
    except Exception as refusal:  # whatever an optimizer says of its hyperparameters
        error = first_line(refusal)
    agree(error, what, group)

    wanted, mains, states = {}, {}, {}  # key in the checkpoint -> tensor to fill, or None for what is no tensor
    for name, tensor in state_of(model).items():
        main_key = stored.get(name, {}).get("main_param")  # of a parameter that had 16 bits when it was saved
        key = f"model.{name}"
        if main_key and tensor.dtype != metadata[key].properties.dtype:
            key = main_key  # rounded once, not twice
        if isinstance(tensor, torch.Tensor):
            wanted[key] = tensor.detach()
    for index, (start, _, main) in pieces.items():
        entries, states[index], shape = dict(stored.get(names[index], {})), {}, params[index].shape
        main_key = entries.pop("main_param", f"model.{names[index]}")
        if main.dtype != params[index].dtype:
            states[index]["main_param"] = torch.empty_like(main)
            mains[main_key] = Shard(states[index]["main_param"], shape, start)
        for entry, key in entries.items():
            if expected and expected[index][entry]:
                states[index][entry] = torch.empty_like(main)
                wanted[key] = Shard(states[index][entry], shape, start)
            else:
                wanted[key] = blank(metadata[key], main)
    agree(read(path, wanted) or read(path, mains), what, group)
    for index, state in states.items():
        for entry, key in stored.get(names[index], {}).items():
            if entry != "main_param":
                state.setdefault(entry, wanted[key])
    install(optimizer, states, groups)
    return values[extra][0]


def read(path, wanted):
    """Fill `wanted`, key -> tensor, or None for what is no tensor. -> what went wrong, or None."""
    try:
        planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(wanted, storage_reader=Reader(path), planner=planner, no_dist=True)
    except OSError as failure:
        return first_line(failure)
    except dcp.api.CheckpointException as failure:
        raise_interrupt(failure, 0)
        return first_line(failure)


def latest(folder) -> Path | None:
    """The newest complete checkpoint in `folder`, by name; None if there is none."""
    folder = Path(folder)
    complete = [path.parent for path in folder.glob(f"*/{MANIFEST}") if path.parent.suffix != ".partial"]
    return max(complete, key=lambda path: path.name, default=None)


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        with open(self.path / ".metadata", "rb") as file:
            return MetadataUnpickler(file).load()


class MetadataUnpickler(pickle.Unpickler):
    """torch.distributed.checkpoint pickles its metadata: only what it consists of is let in, no other code."""

    def find_class(self, module, name):
        if (module, name) in (("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")):  # the latter by Python 3.13
            return Path
        if (module, name) == ("builtins", "getattr"):  # by Python 3.11.2, for the member of an enum
            return lambda _, member: dcp.metadata._MEM_FORMAT_ENCODING[member]
        allowed = {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(("torch.distributed.checkpoint.metadata", name) for name in dcp.metadata.__all__),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        }
        if (module, name) in allowed or module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which no checkpoint needs")


class Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def blank(metadata, param=None):
    """What torch.distributed.checkpoint fills: an uninitialized tensor, or None for anything else.

    If it has the shape of `param` it lies in memory as that does: fused kernels don't look at strides.
    """
    if isinstance(metadata, dcp.metadata.BytesStorageMetadata):
        return None
    like = param if param is not None and param.shape == metadata.size else torch.empty(metadata.size, device="meta")
    return torch.empty_like(like, dtype=metadata.properties.dtype, device="cpu")


def stored_states(metadata) -> dict[str, dict[str, str]]:
    """-> name of a parameter -> entry of its state -> key in the checkpoint."""
    stored = {}
    for key in metadata:
        if key.startswith("optimizer.state."):
            name, _, entry = key.removeprefix("optimizer.state.").rpartition(".")
            stored.setdefault(name, {})[entry] = key
    return stored


def verified(path, rank, world_size) -> dict:
    """The manifest, if the files are those it lists: each rank reads some of them. Raises OSError or ValueError."""
    if not path.is_dir():
        raise ValueError("there is no such folder")
    if not (path / MANIFEST).exists():
        raise ValueError(f"it is not complete: {MANIFEST} is missing")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = sorted(manifest["files"].items())
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{MANIFEST} is damaged") from None
    for name, written in files[rank::world_size]:
        found = checksum(path / name) if (path / name).exists() else None
        if found != written:
            now = f"{found['bytes']} bytes" if found else "missing"
            raise ValueError(f"{name} is damaged: {written['bytes']} bytes with checksum {written['crc32']:08x} were "
                             f"written, now it is {now}" + (f" with {found['crc32']:08x}" if found else ""))
    return manifest


def check(manifest, metadata, model, optimizer, names):
    """Raise ValueError with the first difference, if the checkpoint is of another model or optimizer."""
    here = type(inner_of(optimizer)).__name__
    if manifest["optimizer"] != here:
        raise ValueError(f"it is of {manifest['optimizer']}, this optimizer is {here}")
    ours = {name: tensor.shape for name, tensor in state_of(model).items() if isinstance(tensor, torch.Tensor)}
    theirs = {key.removeprefix("model."): value.size for key, value in metadata.items()
              if key.startswith("model.") and not isinstance(value, dcp.metadata.BytesStorageMetadata)}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            shapes = [f"has it with shape {tuple(shape)}" if shape is not None else "doesn't have it"
                      for shape in (theirs.get(name), ours.get(name))]
            raise ValueError(f"it is of another model: {name}: the checkpoint {shapes[0]}, the model {shapes[1]}")
    groups = [[names[index] for index in group["params"]] for group in packed_groups(optimizer)]
    if manifest["groups"] != groups:
        raise ValueError(f"its parameter groups are {summary(manifest['groups'])}, this optimizer's {summary(groups)}")


def summary(groups):
    return " and ".join(f"{len(names)} from {names[0]} to {names[-1]}" for names in groups)


def checksum(file) -> dict:
    crc = 0
    with open(file, "rb") as opened:
        while chunk := opened.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
        return {"bytes": opened.tell(), "crc32": crc}


def rank_in(group):
    rank, world_size = rank_and_size(group)
    if rank < 0:
        raise CheckpointError("this rank is in no process group since reshard(): the others save, and load")
    return rank, world_size


def raise_interrupt(failure, rank):
    """Ctrl-C stays what it is, on the rank that it came to: torch.distributed.checkpoint wraps that too."""
    error, _ = failure.failures.get(rank, (None, None))
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error from None


def first_line(error):
    if isinstance(error, dcp.api.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    forbidden = re.search(r"GLOBAL \S+", str(error))  # in the fifth line of what torch.load says
    if forbidden:
        return f"it holds {forbidden[0].removeprefix('GLOBAL ')}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
