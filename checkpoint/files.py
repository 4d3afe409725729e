"""Checkpoints in files, which torch.distributed.checkpoint (DCP) writes and reads: torch's own lines made safe.

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

`save` adds that the folder gets its name when all of it is there, checksums, and one error on all ranks. `load` adds
that nothing changes before everything has been read and found to fit. The folders are DCP's: any program with torch's
lines reads them, and `load` reads those of FSDP2 programs.
"""

import errno
import functools
import json
import os
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
DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # of a disk that can't read what it has


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
        asynchronous: copy everything to the CPU, wait for the previous save, and write while training goes on.

    Returns a Future: `.result()` waits, and raises what went wrong. Call it before destroy_process_group(). If nobody
    does, the next save raises the error. It is printed at once, too.

    Raises, on every rank:
        UnfitModel: `optimizer` is of another model, or two ranks have different parameters of one name.
        CheckpointError: `path` exists or can't be written, something can't be read again, an earlier save has failed.
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
    """Return the stage's optimizer in a wrapper, such as accelerate's, Lightning's or Fabric's; else `optimizer`."""
    wrapped = getattr(optimizer, "optimizer", None)
    return unwrapped_optimizer(wrapped) if hasattr(wrapped, "pieces") or hasattr(wrapped, "n_ranks") else optimizer


def saver_for(optimizer) -> Saver:
    """Return the Saver of the ranks that share the model: with DTensors, all ranks of their meshes. Collective."""
    optimizer = unwrapped_optimizer(optimizer)
    meshes = dict.fromkeys(param.device_mesh for param in all_params(optimizer) if isinstance(param, DTensor))
    return saver_of(getattr(optimizer, "process_group", None), meshes)


def state_to_save(path, model, optimizer, extra, is_copied, group) -> dict:
    """Return what this rank saves. Collective: raises on every rank if the ranks don't save one model to one path."""
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
    """Return what torch's get_state_dict() returns. It makes a plain optimizer's first state, which is dropped here."""
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
    """Return what must be equal on all ranks that have it: the path; and of each parameter the shape, and of an expert
    the ranks that have this expert.
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
    """Raise UnfitModel if two ranks have one name for different things."""
    rank_and_fact = {}
    for rank, facts in enumerate(facts_of_ranks):
        for name, fact in facts.items():
            first_rank, first_fact = rank_and_fact.setdefault(name, (rank, fact))
            if fact != first_fact:
                raise UnfitModel(f"{name} is {fact} on rank {rank}, and {first_fact} on rank {first_rank}: all ranks "
                                 "must save one model to one path (a time in it comes from one rank), and each expert "
                                 "needs a name of its own, such as its number among all")


def make_partial_folder(path, group) -> Path:
    """Make the folder in which `path` is written until everything is in it, on the first rank. Collective."""
    token = all_gather(secrets.token_hex(4), group)[0]
    partial = path.with_name(f"{path.name}.{token}.partial")
    with errors_on_all(f"checkpoint {path} can't be written", group):
        if rank_and_size(group)[0] == 0:
            if path.exists():
                raise FileExistsError(errno.EEXIST, "it exists already")
            partial.mkdir(parents=True)
    return partial


def write(path, partial, state, group):
    """Write what this rank has to `partial`, then the checksums, and give the folder its name. Collective."""
    error_prefix = f"checkpoint {path} can't be written"
    writer = Writer(partial)
    try:
        with errors_on_all(error_prefix, group):
            dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=group)
        sums_of_ranks = all_gather(writer.fs.sums, group)
        with errors_on_all(error_prefix, group):
            if rank_and_size(group)[0] == 0:
                finish(path, partial, {name: sums for of_rank in sums_of_ranks for name, sums in of_rank.items()})
    except (CheckpointError, KeyboardInterrupt, SystemExit):  # not after a time-out: other ranks may still write
        shutil.rmtree(partial, ignore_errors=True)
        raise


def finish(path, partial, sums):
    """Write the checksums, and give the folder its name."""
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
    """Read a checkpoint into `model` and `optimizer`, each rank what it needs. Return `extra`. Collective.

    On another number of ranks than it was saved on, `extra` is that of rank 0. Its tensors are on the CPU. Everything
    is read before anything is changed: for that moment each rank has the model and its state a second time, on the CPU.
    A checkpoint that torch's own lines have written for FSDP2 is loaded, too; its `extra` is None.

    Raises, on every rank, before anything is changed:
        DamagedCheckpoint: it is damaged, or not complete, or the disk can't read it.
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
    """Return a ForeignCheckpoint for what doesn't fit, a DamagedCheckpoint for what a disk can't read, else `error`."""
    if isinstance(error, (ValueError, KeyError)) and not isinstance(error, CheckpointError):
        return ForeignCheckpoint(f"it is of another model or optimizer: {error}")
    return DamagedCheckpoint(error.strerror) if getattr(error, "errno", None) in DISK_ERRORS else error


def is_flattened(metadata):
    """Return whether the optimizer's state has torch's flattened form, with hyperparameters for each parameter."""
    return any(path[0] == "optimizer" and len(path) == 2 for path in (metadata.planner_data or {}).values())


def memory_for(own_state, metadata, group) -> dict:
    """Return what this rank reads: memory on the CPU for each tensor of `own_state`, and keys of other values.

    The checkpoint decides which hyperparameters there are, and whether there is an `extra`.
    """
    stored = metadata.state_dict_metadata
    state = tree_map_only(torch.Tensor, empty_on_cpu, own_state)
    memory_of = {}
    for name, tensor in own_state["model"].items():
        if isinstance(tensor, torch.Tensor):
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
                raise UnfitModel(f"{name} is expanded, so nothing can be copied into it: make it contiguous()")
            if tensor.data_ptr():  # tied tensors are read once
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
    return torch.empty_like(tensor, device=tensor.device if isinstance(tensor, DTensor) else "cpu")


def options_to_read(number, stored) -> dict:
    """Return memory for the hyperparameters that a parameter group has in the checkpoint; None for what is no tensor.
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
    """Return key of `state` -> key in the checkpoint, of the model and of main parameters.

    torchtitan has the names of the model beside "optimizer", and not under "model". Where only one of checkpoint and
    optimizer has main parameters, these are the model's parameters for the other. And a model of another dtype is
    read from the main parameters, so that it is rounded once.
    """
    stored = metadata.state_dict_metadata
    own_keys, _ = flatten_state_dict(state)
    is_at_the_top = any(name in stored and f"model.{name}" not in stored for name in state["model"])
    key_in_file = {}
    main_key_of = {}  # id of the memory of a parameter, which tied ones share -> key of its main parameter
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
    """Return beginnings of keys that may be in a checkpoint though nothing uses them."""
    frozen = [f"optimizer.state.{name}." for name, param in model.named_parameters() if not param.requires_grad]
    return "about", "extra.", *frozen  # the first in those of 0.3


def groups_to_load(state, own_state, optimizer) -> list[dict]:
    """Return the parameter groups that were read, with this optimizer's own names and options of computing.

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
    """Return a saved group with this program's options of computing, which are nothing of the model."""
    model_options = {key: value for key, value in saved_group.items() if key not in HOW_IT_COMPUTES}
    return {**model_options, **{key: value for key, value in own_group.items() if key in HOW_IT_COMPUTES}}


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in `folder` with the highest number at the end of its name; None without any.

    Names without such a number, such as best, don't count.
    """
    complete = {path.parent for path in Path(folder).glob(f"*/{METADATA}")
                if path.is_file() and re.search(r"\d$", path.parent.name)}
    return max(complete, key=lambda path: (int(re.search(r"\d+$", path.name)[0]), path.name), default=None)
