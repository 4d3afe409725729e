"""Saves checkpoints in files and loads them, by torch.distributed.checkpoint (DCP): torch's own lines made safe.

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

`save` adds three things: checksums, one error on all ranks, and a folder that gets its name when it is complete. `load`
changes nothing before everything has been read and fits. The folders are DCP's: any program with torch's lines reads
them, and `load` reads the folders of FSDP2 programs.
"""

import errno
import functools
import json
import os
import pickle
import re
import secrets
import shutil
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from guard.groups import all_params

from .ranks import (
    CheckpointError,
    DamagedCheckpoint,
    ForeignCheckpoint,
    Saver,
    UnfitModel,
    all_gather,
    errors_on_all,
    rank_and_size,
    saver_of,
)
from .storage import METADATA, SUMS, LoadPlanner, Reader, SavePlanner, Writer, packed, renamed

# Hyperparameters about how this process computes, so they are saved but not loaded.
HOW_IT_COMPUTES = {"fused", "foreach", "capturable", "differentiable", "param_names"}
DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # a disk can't read its own content


@torch.no_grad()
def save(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: object = None,
         *, asynchronous: bool = False) -> Future[None]:
    """Write a checkpoint: a folder `path`, which appears when it is complete. Collective.

    With tensor parallelism all ranks of the mesh call this function.

    Args:
        path: doesn't exist yet, and lies where all ranks can write. Until it exists there is a "….partial" beside it.
        model: where several ranks have one value, the first rank's is saved.
        optimizer: a DistributedOptimizer of any stage, guard.chained.Chained, or a torch optimizer. Chained may have
            experts of smaller process groups if each expert has a name of its own.
        extra: anything more of this rank, such as random states: numbers, texts, bytes, tensors, dtypes, devices, and
            dicts, lists, tuples and sets of these. Hyperparameters in parameter groups must be of these kinds, too.
        asynchronous: copy everything to the CPU, wait for the previous save, and write while training goes on.

    Returns a Future: `.result()` waits, and raises the error of the save. Call it before destroy_process_group(). If
    nobody calls it, the next save raises the error. An error is printed at once, too.

    Raises, on every rank:
        UnfitModel: `optimizer` is of another model, or two ranks have different parameters of one name.
        CheckpointError: `path` exists or can't be written, a value couldn't be read again, an earlier save has failed.
        RuntimeError: a rank doesn't come within the time-out of the process group, or ends while it writes.
    """
    path = Path(path).absolute()
    saver = saver_for(optimizer)
    saver.finish_last()
    state = state_to_save(path, model, unwrapped_optimizer(optimizer), extra, asynchronous, saver.group)
    partial = make_partial_folder(path, saver.group)
    if asynchronous:
        return saver.in_background(write, path, partial, state, saver.group)
    write(path, partial, state, saver.group)
    done = Future()
    done.set_result(None)
    return done


def unwrapped_optimizer(optimizer):
    """Return the stage's optimizer inside a wrapper of accelerate, Lightning or Fabric. Without a wrapper: `optimizer`.
    """
    wrapped = getattr(optimizer, "optimizer", None)
    is_ours = hasattr(wrapped, "pieces") or hasattr(wrapped, "n_ranks")  # a stage's optimizer, or a Chained
    return unwrapped_optimizer(wrapped) if is_ours else optimizer


def saver_for(optimizer) -> Saver:
    """Return the Saver of all ranks that share the model, also over the meshes of DTensors. Collective."""
    optimizer = unwrapped_optimizer(optimizer)
    meshes = dict.fromkeys(param.device_mesh for param in all_params(optimizer) if isinstance(param, DTensor))
    return saver_of(getattr(optimizer, "process_group", None), meshes)


def state_to_save(path, model, optimizer, extra, is_copied, group) -> dict:
    """Return the state that this rank saves, with copies on the CPU if `is_copied`. Collective.

    Raises on every rank: the ranks don't save one model to one path, or a state can't be saved.
    """
    error_prefix = f"checkpoint {path} can't be written"
    rank, _ = rank_and_size(group)
    with errors_on_all(error_prefix, group):
        state = torchs_state(model, optimizer)
        state["extra"] = {str(rank): packed(extra)}
        if is_copied:
            state = tree_map_only(torch.Tensor, copy_on_cpu, state)
        facts = facts_to_agree_on(path, model, optimizer, state["model"])
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    with errors_on_all(error_prefix, group):
        refuse_different(all_gather(facts, group))
    return state


def torchs_state(model, optimizer, options=None) -> dict:
    """Return the state_dicts of torch's get_state_dict(). If it makes a plain optimizer's first state, drop that."""
    params_of_model = {*model.parameters()}
    for key in [*all_params(optimizer), *optimizer.state]:
        if key not in params_of_model:
            name = f"of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise UnfitModel(f"the optimizer has a parameter or state {name:.60}, which isn't the model's: pass the "
                             "model that it trains, and keep a state of no parameter elsewhere")
    had_state = bool(optimizer.state)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if not had_state:
        optimizer.state.clear()
    return {"model": model_state, "optimizer": optimizer_state}


def copy_on_cpu(tensor):
    return tensor.detach().to("cpu", copy=True)


def facts_to_agree_on(path, model, optimizer, model_state) -> dict:
    """Return name -> fact. Ranks that have the same name must have equal facts.

    Facts are the path, the number of parameter groups, and the shape of each tensor of the model; for an expert's
    parameter also the ranks that have this expert.
    """
    names = {param: name for name, param in model.named_parameters()}
    ranks_of_experts = {}
    for member, n_ranks in zip(getattr(optimizer, "optimizers", ()), getattr(optimizer, "n_ranks", ())):
        if n_ranks < max(optimizer.n_ranks):
            ranks = dist.get_process_group_ranks(member.process_group)
            experts = [param for param in all_params(member) if not isinstance(param, DTensor)]
            ranks_of_experts.update({names[param]: ranks for param in experts})
    facts = {"the path": str(path), "the number of parameter groups": len(optimizer.param_groups)}
    for name, value in model_state.items():
        if isinstance(value, torch.Tensor):
            ranks = f" of ranks {ranks_of_experts[name]}" if name in ranks_of_experts else ""
            facts[name] = f"a tensor of shape {tuple(value.shape)}{ranks}"
    return facts


def refuse_different(facts_of_ranks):
    """Raise UnfitModel if two ranks have different facts of one name."""
    rank_and_fact = {}  # name -> (the first rank that has the name, its fact)
    for rank, facts in enumerate(facts_of_ranks):
        for name, fact in facts.items():
            first_rank, first_fact = rank_and_fact.setdefault(name, (rank, fact))
            if fact != first_fact:
                raise UnfitModel(f"{name} is {fact} on rank {rank}, and {first_fact} on rank {first_rank}: all ranks "
                                 "must save one model to one path (a time in it comes from one rank), and each expert "
                                 "needs a name of its own, such as its number among all")


def make_partial_folder(path, group) -> Path:
    """Return the folder that gets the name `path` when it is complete. The first rank makes it. Collective."""
    token = all_gather(secrets.token_hex(4), group)[0]
    partial = path.with_name(f"{path.name}.{token}.partial")
    with errors_on_all(f"checkpoint {path} can't be written", group):
        if rank_and_size(group)[0] == 0:
            if path.exists():
                raise FileExistsError(errno.EEXIST, "it exists already")
            partial.mkdir(parents=True)
    return partial


def write(path, partial, state, group):
    """Write this rank's `state` to the folder `partial`, then the checksums, and rename the folder. Collective."""
    error_prefix = f"checkpoint {path} can't be written"
    writer = Writer(partial)
    try:
        with errors_on_all(error_prefix, group):
            dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=group)
        sums = {}
        for sums_of_rank in all_gather(writer.fs.sums, group):
            sums.update(sums_of_rank)
        with errors_on_all(error_prefix, group):
            if rank_and_size(group)[0] == 0:
                finish(path, partial, sums)
    except (CheckpointError, KeyboardInterrupt, SystemExit):  # after a time-out, other ranks may still write
        shutil.rmtree(partial, ignore_errors=True)
        raise


def finish(path, partial, sums):
    """Write the checksums, and rename the folder `partial` to `path`. sums: file name -> (size in bytes, CRC-32)."""
    for name in sums:
        if not (partial / name).is_file():
            raise FileNotFoundError(errno.ENOENT, f"{name} of another rank isn't here: all need the same folder")
    with open(partial / SUMS, "w") as file:
        json.dump(sums, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)  # refuses a folder that another program has written meanwhile


# ------------------------------------------------------------------------------------------------------------ loading


@torch.no_grad()
def load(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Read a checkpoint into `model` and `optimizer`: each rank reads the parts that it needs. Collective.

    Returns the `extra` that this rank has saved, with tensors on the CPU; on another number of ranks, that of rank 0. A
    checkpoint that torch's own lines have written for FSDP2 is loaded, too; its `extra` is None.

    Everything is read before anything is changed. So for a moment each rank has the model and its state a second time,
    on the CPU.

    Raises, on every rank, before anything is changed:
        DamagedCheckpoint: the checkpoint is damaged, or not complete, or the disk can't read it.
        ForeignCheckpoint: it is of another model or optimizer, or has keys that nothing here uses.
        CheckpointError: anything else.
    """
    saver = saver_for(optimizer)
    optimizer = unwrapped_optimizer(optimizer)
    group = saver.group
    error_prefix = f"checkpoint {path} can't be loaded"
    failing_together = functools.partial(errors_on_all, error_prefix, group, as_checkpoint_error)
    wait([saver.last])
    with failing_together():
        reader = Reader(Path(path), *rank_and_size(group))
    with failing_together():
        if len(set(all_gather(reader.checksum, group))) > 1:
            raise CheckpointError("the ranks read different checkpoints")
        options = StateDictOptions(flatten_optimizer_state_dict=is_flattened(reader.metadata))
        own_state = torchs_state(model, optimizer, options)
        state = memory_for(own_state, reader.metadata, group)
        reader.metadata = renamed(reader.metadata, keys_in_file(state, reader.metadata))
    with failing_together():
        planner = LoadPlanner(keys_without_use(model))
        dcp.load(state, storage_reader=reader, planner=planner, process_group=group)
        if not options.flatten_optimizer_state_dict:
            state["optimizer"]["param_groups"] = groups_to_load(state, own_state, optimizer)
    with failing_together():
        if options.flatten_optimizer_state_dict:
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        else:
            optimizer.load_state_dict(state["optimizer"])
        set_model_state_dict(model, state["model"])
    return next(iter(state.get("extra", {}).values()), None)


def as_checkpoint_error(error):
    """Return `error` as the subclass of CheckpointError that it is, or `error` itself.

    A value that doesn't fit means a ForeignCheckpoint. A pickle or a disk that can't be read means a DamagedCheckpoint.
    """
    if isinstance(error, (ValueError, KeyError)) and not isinstance(error, CheckpointError):
        return ForeignCheckpoint(f"it is of another model or optimizer: {error}")
    if isinstance(error, pickle.UnpicklingError):  # torch's text would say how to run the code
        return DamagedCheckpoint("a tensor is damaged: it is no plain value")
    if getattr(error, "errno", None) in DISK_ERRORS:
        return DamagedCheckpoint(error.strerror)
    return error


def is_flattened(metadata):
    """Return whether the optimizer's state has torch's flattened form, in which each parameter has hyperparameters."""
    return any(path[0] == "optimizer" and len(path) == 2 for path in (metadata.planner_data or {}).values())


def memory_for(own_state, metadata, group) -> dict:
    """Return a state_dict for DCP to fill: memory on the CPU for each tensor of `own_state`, and keys of other values.

    It has the hyperparameters that the checkpoint has, and an `extra` if the checkpoint has any.
    """
    stored = metadata.state_dict_metadata
    state = tree_map_only(torch.Tensor, empty_on_cpu, own_state)
    memory_of = {}
    for name, tensor in own_state["model"].items():
        if isinstance(tensor, torch.Tensor):
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
                raise UnfitModel(f"{name} is expanded, so nothing can be copied into it: make it contiguous()")
            if tensor.data_ptr():  # tied tensors get one memory
                place = tensor.data_ptr(), tensor.shape, tensor.stride()
                state["model"][name] = memory_of.setdefault(place, state["model"][name])
    rank, n_ranks = rank_and_size(group)
    n_extras = sum(re.fullmatch(r"extra\.\d+", key) is not None for key in stored)
    if n_extras:
        state["extra"] = {str(rank if n_extras == n_ranks else 0): None}
    if is_flattened(metadata):
        state["optimizer"] = {key: value for key, value in state["optimizer"].items()
                              if f"optimizer.{key}" in stored or not key.startswith("param_groups.")}
    else:
        numbers = range(len(own_state["optimizer"]["param_groups"]))
        state["optimizer"]["param_groups"] = [options_to_read(number, stored) for number in numbers]
    return state


def empty_on_cpu(tensor):
    """Return memory for a tensor on the CPU; for a DTensor on its own device."""
    return torch.empty_like(tensor, device=tensor.device if isinstance(tensor, DTensor) else "cpu")


def options_to_read(number, stored) -> dict:
    """Return hyperparameter -> memory for its tensor, or None if it is no tensor, for group `number` of the checkpoint.
    """
    prefix = f"optimizer.param_groups.{number}."
    options = {}
    for key in [key for key in stored if key.startswith(prefix)]:
        is_tensor = not isinstance(stored[key], BytesStorageMetadata)
        value = torch.empty(stored[key].size, dtype=stored[key].properties.dtype) if is_tensor else None
        options[key.removeprefix(prefix)] = value
    if "params" not in options:
        beginnings = ", ".join(dict.fromkeys(key.partition(".")[0] for key in stored))
        raise ForeignCheckpoint(f"it has {number} parameter groups under optimizer, and more are here: its keys begin "
                                f"with {beginnings}")
    return options


def keys_in_file(state, metadata) -> dict[str, str]:
    """Return key of `state` -> key in the checkpoint, for the model and for main parameters.

    torchtitan has the names of the model beside "optimizer", and not under "model". If only the optimizer has main
    parameters, they are read from the checkpoint's model. If only the checkpoint has them, the model is read from them.
    A model of another dtype is also read from the main parameters, so that it is rounded once.
    """
    stored = metadata.state_dict_metadata
    own_keys, _ = flatten_state_dict(state)
    is_at_the_top = any(name in stored and f"model.{name}" not in stored for name in state["model"])
    key_in_file = {}
    main_key_of = {}  # id of a parameter's memory, which tied parameters share -> key of the main parameter
    for name, memory in state["model"].items():
        model_key = name if is_at_the_top else f"model.{name}"
        main_key = f"optimizer.state.{name}.main_param"
        if main_key in own_keys:
            key_in_file[main_key] = main_key if main_key in stored else model_key
        if main_key in stored and (main_key not in own_keys or stored[model_key].properties.dtype != memory.dtype):
            main_key_of[id(memory)] = main_key
        key_in_file[f"model.{name}"] = main_key_of.get(id(memory), model_key)
    return key_in_file


def keys_without_use(model):
    """Return the beginnings of keys that a checkpoint may have although `load` doesn't use them."""
    frozen = [f"optimizer.state.{name}." for name, param in model.named_parameters() if not param.requires_grad]
    return "about", "extra.", *frozen  # version 0.3 wrote "about"


def groups_to_load(state, own_state, optimizer) -> list[dict]:
    """Return the parameter groups of the checkpoint, with this optimizer's names of parameters and HOW_IT_COMPUTES.

    Raises ForeignCheckpoint: a parameter was in another group.
    """
    saved_groups = state["optimizer"]["param_groups"]
    saved_number_of = {name: number for number, group in enumerate(saved_groups) for name in group["params"]}
    groups = []
    for number, own_group in enumerate(own_state["optimizer"]["param_groups"]):
        for name in own_group["params"]:
            saved_number = saved_number_of.get(name, number)
            if saved_number != number:
                raise ForeignCheckpoint(f"{name} was in parameter group {saved_number}, and is in {number} here")
        group = with_own_options(saved_groups[number], optimizer.param_groups[number])
        groups.append({**group, "params": own_group["params"]})
    return groups


def with_own_options(saved_group, own_group):
    """Return `saved_group` with the entries HOW_IT_COMPUTES of `own_group`."""
    options = {key: value for key, value in saved_group.items() if key not in HOW_IT_COMPUTES}
    own_options = {key: value for key, value in own_group.items() if key in HOW_IT_COMPUTES}
    return {**options, **own_options}


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in `folder` with the highest number at the end of its name; None if there is none.

    A checkpoint without such a number, such as "best", doesn't count.
    """
    complete = {path.parent for path in Path(folder).glob(f"*/{METADATA}")
                if path.is_file() and re.search(r"\d$", path.parent.name)}
    return max(complete, key=lambda path: (int(re.search(r"\d+$", path.name)[0]), path.name), default=None)
