"""Checkpoints in files, which torch.distributed.checkpoint (DCP) writes and reads: torch's own lines made safe.

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

`save` adds that the folder appears when all of it is there, checksums, and one error on all ranks; `load`, that nothing
changes before everything has been read and found to fit. The folders are DCP's: any program with torch's lines reads
them, and `load` reads those of FSDP2 programs.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from guard.flat_shard import FlatShard

from .ranks import (
    CheckpointError,
    DamagedCheckpoint,
    ForeignCheckpoint,
    Saver,
    Saving,
    UnfitModel,
    all_gather,
    errors_on_all,
    rank_and_size,
    saver_of,
)
from .storage import METADATA, SUMS, LoadPlanner, Reader, SavePlanner, Writer, packed

# Hyperparameters about how this process computes, so they are saved but not loaded.
HOW_IT_COMPUTES = {"fused", "foreach", "capturable", "differentiable", "param_names"}
PLAIN = bool, int, float, complex, str, bytes, type(None)
DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # of a disk that can't read what it has
RUN_ID = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # the same when torchrun starts the ranks again
RUN = secrets.token_hex(4) if RUN_ID == "none" else f"{zlib.crc32(RUN_ID.encode()):08x}"
N_RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@torch.no_grad()
def save(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: object = None,
         *, asynchronous: bool = False) -> Future[None]:
    """Write a checkpoint: a folder `path`, which appears when everything is in it. Collective.

    With tensor parallelism all ranks of the mesh call it.

    Args:
        path: doesn't exist yet, and lies where all ranks can write. Until it exists there is a "….partial" beside it.
        model: what all ranks have of it is saved as the first rank has it.
        optimizer: a DistributedOptimizer of any stage, guard.chained.Chained, or a torch optimizer. Chained may have
            experts of smaller process groups if each expert has a name of its own.
        extra: anything more of this rank, such as random states: numbers, texts, bytes, tensors, dtypes, devices, and
            dicts, lists, tuples and sets of these. What parameter groups hold must be like that too.
        asynchronous: copy everything to the CPU, wait for the save before, and write while training goes on.

    Returns a Future: `.result()` waits, and raises what went wrong. Call it before destroy_process_group(). If nobody
    does, the next save raises the error, or Python prints it when it ends.

    Raises, on every rank:
        UnfitModel: `optimizer` is of another model, or two ranks have different parameters of one name.
        CheckpointError: `path` exists or can't be written, something can't be read again, an earlier save has failed.
        RuntimeError: a rank doesn't come within the time-out of the process group, or ends while it writes.
    """
    path, optimizer = Path(path), unwrapped_optimizer(optimizer)
    saver = saver_for(optimizer)
    saver.finish_last()
    state = state_to_save(path, model, optimizer, extra, saver.group)
    if asynchronous:
        with errors_on_all(f"checkpoint {path} can't be written", saver.group):
            state = tree_map_only(torch.Tensor, copy_on_cpu, state)
    partial = make_partial(path, saver.group)
    if asynchronous:
        saver.last = Saving()
        saver.thread.submit(write_behind, saver.last, path.absolute(), partial.absolute(), state, saver.group)
        return saver.last
    write(path, partial, state, saver.group)
    done = Future()
    done.set_result(None)
    return done


def unwrapped_optimizer(optimizer):
    """Return the stage's optimizer in a wrapper, such as accelerate's, Lightning's or Fabric's; else `optimizer`."""
    wrapped = getattr(optimizer, "optimizer", None)
    return unwrapped_optimizer(wrapped) if hasattr(wrapped, "pieces") or hasattr(wrapped, "n_ranks") else optimizer


def saver_for(optimizer) -> Saver:
    """Return the Saver of the ranks that share the model: with DTensors, all ranks of their meshes. Collective."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
    return saver_of(getattr(optimizer, "process_group", None), meshes)


@contextlib.contextmanager
def states_of(model, optimizer, options=None) -> Iterator[dict]:
    """Give what torch's get_state_dict() returns, which makes a plain optimizer's state: that is dropped afterwards."""
    params = {param: name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in params:
                raise UnfitModel(f"a parameter of shape {tuple(param.shape)} of the optimizer isn't in the model: pass "
                                 "the model that it trains")
    for key in optimizer.state:
        if key not in params:
            raise UnfitModel(f"optimizer.state has an entry for {key!r:.60}, which is no parameter of the model: it "
                             "would be lost, remove it or keep it elsewhere")
    had_state = bool(optimizer.state)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    yield {"model": model_state, "optimizer": optimizer_state}
    if not had_state and not hasattr(optimizer, "pieces") and not hasattr(optimizer, "n_ranks"):
        optimizer.state.clear()


def state_to_save(path, model, optimizer, extra, group):
    """Return what this rank saves. Collective: raises on every rank if it can't be saved, or loaded again."""
    error_prefix = f"checkpoint {path} can't be written"
    rank, _ = rank_and_size(group)
    with errors_on_all(error_prefix, group), states_of(model, optimizer) as state:
        state["extra"] = {str(rank): packed(extra, "`extra`")}
        for number, options in enumerate(state["optimizer"]["param_groups"]):
            for key, value in options.items():
                options[key] = packed(value, f"{key} of parameter group {number}")
        for name, entries in state["optimizer"]["state"].items():
            for key, value in entries.items():
                if not isinstance(value, (*PLAIN, torch.Tensor)):
                    packed(value, f"{key} in the state of {name}")
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    shapes = {name: tuple(value.shape) for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
    n_groups = len(optimizer.param_groups)
    reports = all_gather((str(path), n_groups, shapes, ranks_of_experts(model, optimizer)), group)
    with errors_on_all(error_prefix, group):
        refuse_different(reports)
    return state


def ranks_of_experts(model, optimizer) -> dict[str, list[int]]:
    """Map the names of parameters whose process group is smaller than Chained's to the ranks of that group."""
    names = {param: name for name, param in model.named_parameters()}
    ranks_by_name = {}
    for member, n_ranks in zip(getattr(optimizer, "optimizers", ()), getattr(optimizer, "n_ranks", ())):
        ranks = dist.get_process_group_ranks(member.process_group or dist.group.WORLD)
        params = [param for group in member.param_groups for param in group["params"]]
        if n_ranks < max(optimizer.n_ranks):
            ranks_by_name.update({names[param]: ranks for param in params if not isinstance(param, DTensor)})
    return ranks_by_name


def refuse_different(reports):
    """Raise CheckpointError or UnfitModel unless all ranks save the same model to the same place.

    `reports`: of each rank the path, the number of groups, name -> shape, and name of an expert -> its ranks.
    """
    first_path, first_n_groups, *_ = reports[0]
    shape_of, ranks_of = {}, {}
    for rank, (path, n_groups, shapes, experts) in enumerate(reports):
        if path != first_path:
            raise CheckpointError(f"rank {rank} saves to {path}, rank 0 to {first_path}: a path with the time in it "
                                  "must come from one rank")
        if n_groups != first_n_groups:
            raise UnfitModel(f"rank {rank} has {n_groups} parameter groups, rank 0 has {first_n_groups}")
        for name, shape in shapes.items():
            ranks = experts.get(name)
            if shape_of.setdefault(name, shape) != shape or ranks_of.setdefault(name, ranks) != ranks:
                raise UnfitModel(f"{name} is another parameter on rank {rank}, with shape {shape}: give each expert a "
                                 "name of its own, such as its number among all")


def make_partial(path, group) -> Path:
    """Return the folder in which `path` is written until it is complete: the first rank makes it. Collective.

    Removes what this run had left in the folder when torchrun started it again, and no other run's.
    """
    name = None
    rank, _ = rank_and_size(group)
    with errors_on_all(f"checkpoint {path} can't be written", group):
        if rank == 0:
            if path.parent.is_file():
                raise NotADirectoryError(errno.ENOTDIR, f"{path.parent} is no folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f"*.{RUN}-*.partial"):
                n_restarts = re.fullmatch(rf".*\.{RUN}-(\d+)-\w+\.partial", left.name)
                if n_restarts and int(n_restarts[1]) < N_RESTARTS:
                    shutil.rmtree(left, ignore_errors=True)
            refuse_existing(path)
            name = f"{path.name}.{RUN}-{N_RESTARTS}-{secrets.token_hex(4)}.partial"
            path.with_name(name).mkdir()
    return path.with_name(all_gather(name, group)[0])


def refuse_existing(path):
    if path.exists():
        raise FileExistsError(errno.EEXIST, "it exists already")


def copy_on_cpu(tensor):
    return tensor.detach().to("cpu", copy=True)


def write(path, partial, state, group):
    """Write what this rank has to `partial`, then the checksums, and give the folder its name. Collective."""
    error_prefix = f"checkpoint {path} can't be written"
    writer = Writer(partial)
    try:
        with errors_on_all(error_prefix, group):
            if not partial.is_dir():
                words = "the folder that rank 0 has made isn't here: all need the same folder"
                raise FileNotFoundError(errno.ENOENT, words)
        with errors_on_all(error_prefix, group), quiet(group):
            dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=group, no_dist=group is None)
        all_sums = all_gather(writer.fs.sums, group)
        with errors_on_all(error_prefix, group):
            if rank_and_size(group)[0] == 0:
                finish(path, partial, {name: sums for sums_of_rank in all_sums for name, sums in sums_of_rank.items()})
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def finish(path, partial, sums):
    with open(partial / SUMS, "w") as file:
        json.dump(sums, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    refuse_existing(path)
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder):
    """Flush a folder: what is in it is there after a power failure too, on file systems that can promise that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_behind(saving, *args):
    try:
        write(*args)
    except BaseException as error:
        saving.set_exception(error.with_traceback(None))  # which would keep the tensors in memory
    else:
        saving.set_result(None)


# ------------------------------------------------------------------------------------------------------------ loading


@torch.no_grad()
def load(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Read a checkpoint into `model` and `optimizer`, each rank what it needs. Return `extra`. Collective.

    On another number of ranks than it was saved on, `extra` is that of rank 0. Its tensors are on the CPU. Everything
    is read before anything is changed: for that moment each rank has the model and its state a second time, on the CPU.
    A checkpoint that torch's own lines have written for FSDP2 is loaded, too; its `extra` is None.

    Raises, on every rank, before anything is changed:
        DamagedCheckpoint: it is damaged, or not complete, or the disk can't read it.
        ForeignCheckpoint: it is of another model or optimizer, or has keys that nothing here uses.
        CheckpointError: anything else.
    """
    path, optimizer = Path(path), unwrapped_optimizer(optimizer)
    saver = saver_for(optimizer)
    group = saver.group
    error_prefix = f"checkpoint {path} can't be loaded"
    wait([saver.last])
    with errors_on_all(error_prefix, group, refusal):
        reader = Reader(path, *rank_and_size(group))
    checksums = all_gather(reader.checksum, group)
    with errors_on_all(error_prefix, group, refusal):
        if len(set(checksums)) > 1:
            raise CheckpointError("the ranks read different checkpoints")
        state, own_names, main_params = room_for(reader.metadata, model, optimizer, group)
    is_at_the_top = has_model_at_the_top(reader.metadata, state["model"])
    if is_at_the_top:
        state = {**state.pop("model"), **state}
    for room, planner in (state, LoadPlanner(unused_keys(model))), ({"model": main_params}, dcp.DefaultLoadPlanner()):
        with errors_on_all(error_prefix, group, refusal), quiet(group):
            dcp.load(room, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    if is_at_the_top:
        state = {"model": state, "optimizer": state.pop("optimizer")}
    with errors_on_all(error_prefix, group, refusal):
        fit_groups(state, own_names, main_params, model, optimizer)
    with errors_on_all(error_prefix, group, refusal):
        if is_flattened(reader.metadata):
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        else:
            optimizer.load_state_dict(state["optimizer"])
        set_model_state_dict(model, state["model"])
    return next(iter(state.get("extra", {}).values()), None)


def unused_keys(model):
    """Return prefixes of keys that may be in a checkpoint though nothing uses them."""
    frozen = [f"optimizer.state.{name}." for name, param in model.named_parameters() if not param.requires_grad]
    return "extra.", *frozen


def has_model_at_the_top(metadata, model_state):
    """Return whether the names of the model stand beside "optimizer", as torchtitan has them, and not under "model"."""
    stored = metadata.state_dict_metadata
    return any(name in stored and f"model.{name}" not in stored for name in model_state)


def is_flattened(metadata):
    """Return whether the optimizer's state has torch's flattened form, with hyperparameters for each parameter."""
    return any(path[0] == "optimizer" and len(path) == 2 for path in (metadata.planner_data or {}).values())


def room_for(metadata, model, optimizer, group):
    """Return what this rank reads from a checkpoint with this metadata, with memory of its own on the CPU.

    The checkpoint decides which hyperparameters there are. Returns the state; the names of the parameters in each
    group, none of torch's flattened form; and name -> main parameter that is read from the model's parameter, because
    the run that saved it had no main parameters.
    """
    stored = metadata.state_dict_metadata
    options = StateDictOptions(flatten_optimizer_state_dict=is_flattened(metadata))
    with states_of(model, optimizer, options) as state:
        own_model_state = state["model"]
        state = tree_map_only(torch.Tensor, empty_on_cpu, state)
    room_at = {}
    for name, value in own_model_state.items():
        if isinstance(value, torch.Tensor) and value.data_ptr():  # tied tensors are read into one
            place = value.data_ptr(), value.shape, value.stride()
            state["model"][name] = room_at.setdefault(place, state["model"][name])
    rank, n_ranks = rank_and_size(group)
    n_extras = sum(re.fullmatch(r"extra\.\d+", key) is not None for key in stored)
    if n_extras:
        state["extra"] = {str(rank if n_extras == n_ranks else 0): None}
    if is_flattened(metadata):
        state["optimizer"] = {key: value for key, value in state["optimizer"].items()
                              if f"optimizer.{key}" in stored or not may_be_missing(key)}
        return state, [], {}
    groups = state["optimizer"]["param_groups"]
    own_names = [options["params"] for options in groups]
    for number, options in enumerate(groups):
        prefix = f"optimizer.param_groups.{number}."
        if f"{prefix}params" not in stored:
            beginnings = ", ".join(dict.fromkeys(key.partition(".")[0] for key in stored))
            raise ForeignCheckpoint(f"it has {number} parameter groups under optimizer, and {len(groups)} are here: "
                                    f"its keys begin with {beginnings}")
        for key in [key for key in options if f"{prefix}{key}" not in stored]:
            del options[key]
        for key in [key.removeprefix(prefix) for key in stored if key.startswith(prefix)]:
            entry = stored[f"{prefix}{key}"]
            is_tensor = not isinstance(entry, BytesStorageMetadata)
            options[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    main_params = {}
    for name, entries in state["optimizer"]["state"].items():
        is_stored = f"optimizer.state.{name}.main_param" in stored
        if "main_param" in entries and not is_stored:
            main_params[name] = entries.pop("main_param")
        elif is_stored and "main_param" not in entries:
            entries["main_param"] = torch.empty_like(state["model"][name])  # more precise than the parameter
    return state, own_names, main_params


def may_be_missing(key):
    """Return whether a checkpoint in the flattened form may lack this key, of a hyperparameter or main parameter."""
    return key.startswith("param_groups.") or key.endswith(".main_param")


def empty_on_cpu(tensor):
    return torch.empty_like(tensor, device=tensor.device if isinstance(tensor, DTensor) else "cpu")


def fit_groups(state, own_names, main_params, model, optimizer):
    """Prepare what was read for load_state_dict(). Raises ForeignCheckpoint: a parameter was in another group."""
    for name, main_param in main_params.items():
        state["optimizer"]["state"][name]["main_param"] = main_param
    for name, entries in state["optimizer"].get("state", {}).items():
        if "main_param" in entries and not isinstance(entries["main_param"], FlatShard):  # nothing here has one
            rounded, precise = state["model"][name], entries.pop("main_param")
            names = [other for other, value in state["model"].items() if value is rounded]  # with those tied to it
            state["model"].update(dict.fromkeys(names, precise))
    groups = state["optimizer"].get("param_groups", [])
    saved_number_of = {name: number for number, group in enumerate(groups) for name in group["params"]}
    for number, (group, names) in enumerate(zip(groups, own_names)):
        for name in names:
            saved_number = saved_number_of.get(name, number)
            if saved_number != number:
                raise ForeignCheckpoint(f"{name} was in parameter group {saved_number}, and is in {number} here")
        group["params"] = names
        keep_own_options(group, optimizer.param_groups[number])


def keep_own_options(saved, own):
    """Put into a saved group what is about how this process computes, and not about the model."""
    for key in HOW_IT_COMPUTES:
        saved.pop(key, None)
        if key in own:
            saved[key] = own[key]


@contextlib.contextmanager
def quiet(group):
    """Leave out DCP's warning that a program without process groups has none."""
    with warnings.catch_warnings():
        if group is None:
            warnings.simplefilter("ignore", UserWarning)
        yield


def refusal(error):
    """Return the error as that of a checkpoint: what doesn't fit is foreign; what the disk can't read is damaged."""
    if isinstance(error, (ValueError, KeyError)) and not isinstance(error, CheckpointError):
        return ForeignCheckpoint(str(error))
    return DamagedCheckpoint(error.strerror) if getattr(error, "errno", None) in DISK_ERRORS else error


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in `folder` with the highest number at the end of its name; None without any.

    Names without such a number, such as best, don't count.
    """
    complete = {path.parent for path in Path(folder).glob(f"*/{METADATA}")
                if path.is_file() and re.search(r"\d$", path.parent.name)}
    return max(complete, key=lambda path: (int(re.search(r"\d+$", path.name)[0]), path.name), default=None)
