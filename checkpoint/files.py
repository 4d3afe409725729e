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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
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

# Entries of a parameter group that are saved, and that a load leaves as they are here. They say how this process
# computes, or what this model calls its parameters.
KEPT_OPTIONS = {"fused", "foreach", "capturable", "differentiable", "param_names"}
DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # a disk can't read its own content


@torch.no_grad()
def save(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: object = None,
         *, asynchronous: bool = False) -> Future[None]:
    """Write a checkpoint: a folder `path`, which appears when it is complete. Collective.

    With tensor parallelism all ranks of the mesh call this function.

    Args:
        path: doesn't exist yet, and lies where all ranks can write. Until it exists, "….partial" is beside it.
        model: of a parameter that several ranks have, the first rank's values are saved.
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
    optimizer = unwrapped_optimizer(optimizer)
    saver = saver_for(optimizer)
    group = saver.group
    saver.finish_last()
    state = state_to_save(path, model, optimizer, extra, asynchronous, group)
    partial = make_partial_folder(path, group)
    if asynchronous:
        return saver.in_background(write, path, partial, state, group)
    write(path, partial, state, group)
    done = Future()
    done.set_result(None)
    return done


def unwrapped_optimizer(optimizer):
    """Return the stage's optimizer that a wrapper of accelerate, Lightning or Fabric holds; without one, `optimizer`.

    The attribute `optimizer` of a wrapper is a stage's optimizer or another wrapper; a stage's is a torch optimizer.
    """
    inner = getattr(optimizer, "optimizer", None)
    is_wrapper = hasattr(inner, "pieces") or hasattr(inner, "n_ranks")  # a stage's optimizer, or a Chained, is inside
    return unwrapped_optimizer(inner) if is_wrapper else optimizer


def saver_for(optimizer) -> Saver:
    """Return the Saver of all ranks that share the model, also over the meshes of DTensors. Collective.

    The Saver has a process group for messages between these ranks, and the thread that writes asynchronous saves.
    """
    dtensors = [param for param in all_params(optimizer) if isinstance(param, DTensor)]
    meshes = dict.fromkeys(param.device_mesh for param in dtensors)  # each mesh once, in one order on all ranks
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
    """Return the state_dicts of `model` and `optimizer`, as torch's get_state_dict() makes them.

    Raises UnfitModel: the optimizer has a parameter, or a state of anything else, that isn't the model's.
    """
    params_of_model = set(model.parameters())
    for key in [*all_params(optimizer), *optimizer.state]:  # a state's key is a parameter, but may be anything
        if key not in params_of_model:
            name = f"of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise UnfitModel(f"the optimizer has a parameter or state {name:.60}, which isn't the model's: pass the "
                             "model that it trains, and keep a state of no parameter elsewhere")
    had_state = bool(optimizer.state)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if not had_state:
        optimizer.state.clear()  # get_state_dict() has stepped a plain torch optimizer, so that it has a state
    return {"model": model_state, "optimizer": optimizer_state}


def copy_on_cpu(tensor):
    return tensor.detach().to("cpu", copy=True)


def facts_to_agree_on(path, model, optimizer, model_state) -> dict:
    """Return name -> fact. Ranks that have the same name must have equal facts.

    Facts are the path, the number of parameter groups, and the shape of each tensor of the model; for an expert's
    parameter also the ranks that have this expert.
    """
    names = {param: name for name, param in model.named_parameters()}
    ranks_of_expert = {}  # name of a parameter -> the ranks that have this expert
    if hasattr(optimizer, "n_ranks"):  # a Chained, which has for each of its optimizers the number of ranks
        for member, n_ranks in zip(optimizer.optimizers, optimizer.n_ranks):
            if n_ranks < max(optimizer.n_ranks):
                ranks = dist.get_process_group_ranks(member.process_group)
                for param in all_params(member):
                    if not isinstance(param, DTensor):  # ranks in several groups have parts of one DTensor
                        ranks_of_expert[names[param]] = ranks
    facts = {"the path": str(path), "the number of parameter groups": len(optimizer.param_groups)}
    for name, value in model_state.items():
        if isinstance(value, torch.Tensor):
            of_ranks = f" of ranks {ranks_of_expert[name]}" if name in ranks_of_expert else ""
            facts[name] = f"a tensor of shape {tuple(value.shape)}{of_ranks}"
    return facts


def refuse_different(facts_of_ranks):
    """Raise UnfitModel if two ranks have different facts of one name. facts_of_ranks: the dict of each rank."""
    first_ranks = {}  # name -> the first rank that has a fact of this name
    for rank, facts in enumerate(facts_of_ranks):
        for name, fact in facts.items():
            first_rank = first_ranks.setdefault(name, rank)
            first_fact = facts_of_ranks[first_rank][name]
            if fact != first_fact:
                raise UnfitModel(f"{name} is {fact} on rank {rank}, and {first_fact} on rank {first_rank}: all ranks "
                                 "must save one model to one path (a time in it comes from one rank), and each expert "
                                 "needs a name of its own, such as its number among all")


def make_partial_folder(path, group) -> Path:
    """Return the folder that gets the name `path` when it is complete. The first rank makes it. Collective."""
    token, *_ = all_gather(secrets.token_hex(4), group)  # the first rank's
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
        for sums_of_rank in all_gather(writer.fs.sums, group):  # of the files that each rank has written
            sums.update(sums_of_rank)
        with errors_on_all(error_prefix, group):
            if rank_and_size(group)[0] == 0:
                finish(path, partial, sums)
    except (CheckpointError, KeyboardInterrupt, SystemExit):  # no time-out: then other ranks may still be writing
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
    partial.rename(path)  # an error if another program has written a folder `path` meanwhile


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
    optimizer = unwrapped_optimizer(optimizer)
    saver = saver_for(optimizer)
    group = saver.group
    # An error in a block below becomes a CheckpointError on all ranks, when the block ends.
    failing_together = functools.partial(errors_on_all, f"checkpoint {path} can't be loaded", group,
                                         as_checkpoint_error)
    wait([saver.last])  # an asynchronous save: the next save raises its error, if there is one
    with failing_together():
        reader = Reader(Path(path), *rank_and_size(group))
    with failing_together():
        if len(set(all_gather(reader.checksum, group))) > 1:
            raise CheckpointError("the ranks read different checkpoints")
        options = StateDictOptions(flatten_optimizer_state_dict=is_flattened(reader.metadata))
        own_state = torchs_state(model, optimizer, options)
        state = memory_for(own_state, reader.metadata, group)
        stored_keys = keys_in_checkpoint(state, reader.metadata)
        reader.metadata = renamed(reader.metadata, stored_keys)  # as if the checkpoint had the keys of `state`
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
    (extra,) = state.get("extra", {"": None}).values()
    return extra


def as_checkpoint_error(error):
    """Return the subclass of CheckpointError that `error` means, with a text; or `error`, if it means none.

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
    """Return whether the optimizer's state has torch's flattened form: one dict, whose keys name the parameters.

    Each parameter then has hyperparameters of its own, such as "param_groups.layer.weight.lr".
    """
    # Where a value was in nested dicts: ("optimizer", "state", name, "exp_avg"); flattened, ("optimizer", a long key).
    places = (metadata.planner_data or {}).values()
    return any(place[0] == "optimizer" and len(place) == 2 for place in places)


def memory_for(own_state, metadata, group) -> dict:
    """Return a state_dict for DCP to fill, with memory on the CPU for each tensor of `own_state`.

    Its parameter groups have the hyperparameters that the checkpoint has. It has an `extra` if the checkpoint has any.
    """
    stored = metadata.state_dict_metadata  # key -> DCP's description of the value
    state = tree_map_only(torch.Tensor, empty_on_cpu, own_state)
    memory_of = {}  # where a tensor of the model lies -> its memory on the CPU: tied tensors get the same
    for name, tensor in own_state["model"].items():
        if isinstance(tensor, torch.Tensor):
            # Several elements of an expanded tensor lie in one place.
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
                raise UnfitModel(f"{name} is expanded, so nothing can be copied into it: make it contiguous()")
            if tensor.data_ptr():  # 0: it has no elements, or no memory of its own
                memory = state["model"][name]
                place = tensor.data_ptr(), tensor.shape, tensor.stride()
                state["model"][name] = memory_of.setdefault(place, memory)
    rank, n_ranks = rank_and_size(group)
    n_extras = len([key for key in stored if re.fullmatch(r"extra\.\d+", key)])
    if n_extras:
        source = rank if n_extras == n_ranks else 0  # the rank whose `extra` is read
        state["extra"] = {str(source): None}
    if is_flattened(metadata):
        for key in list(state["optimizer"]):
            if key.startswith("param_groups.") and f"optimizer.{key}" not in stored:
                del state["optimizer"][key]
    else:
        numbers = range(len(own_state["optimizer"]["param_groups"]))
        state["optimizer"]["param_groups"] = [options_to_read(number, stored) for number in numbers]
    return state


def empty_on_cpu(tensor):
    """Return memory for a tensor on the CPU; for a DTensor on its own device."""
    return torch.empty_like(tensor, device=tensor.device if isinstance(tensor, DTensor) else "cpu")


def options_to_read(number, stored) -> dict:
    """Return a dict for DCP to fill with the hyperparameters of group `number`: memory for tensors, None for others.

    stored: key in the checkpoint -> DCP's description of the value.
    """
    prefix = f"optimizer.param_groups.{number}."
    options = {}
    for key, description in stored.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            options[name] = None
            if isinstance(description, TensorStorageMetadata):
                options[name] = torch.empty(description.size, dtype=description.properties.dtype)
    if "params" not in options:
        first_words = dict.fromkeys(key.partition(".")[0] for key in stored)  # each once
        raise ForeignCheckpoint(f"it has {number} parameter groups under optimizer, and more are here: its keys begin "
                                f"with {', '.join(first_words)}")
    return options


def keys_in_checkpoint(state, metadata) -> dict[str, str]:
    """Return key of `state` -> key in the checkpoint, for the model and for main parameters.

    A main parameter is the fp32 tensor that an optimizer steps in place of a 16-bit parameter of the model.
    torchtitan has the names of the model beside "optimizer", and not under "model". If only the optimizer has main
    parameters, they are read from the checkpoint's model. If only the checkpoint has them, the model is read from them.
    A model of another dtype is also read from the main parameters, so that it is rounded once.
    """
    stored = metadata.state_dict_metadata
    own_keys, _ = flatten_state_dict(state)
    is_at_the_top = any(name in stored and f"model.{name}" not in stored for name in state["model"])
    stored_keys = {}
    main_key_of = {}  # id of a parameter's memory, which tied parameters share -> key of the main parameter
    for name, memory in state["model"].items():
        model_key = name if is_at_the_top else f"model.{name}"
        main_key = f"optimizer.state.{name}.main_param"
        if main_key in own_keys:
            stored_keys[main_key] = main_key if main_key in stored else model_key
        if main_key in stored:
            has_main_param = main_key in own_keys
            if not has_main_param or stored[model_key].properties.dtype != memory.dtype:
                main_key_of[id(memory)] = main_key
        stored_keys[f"model.{name}"] = main_key_of.get(id(memory), model_key)
    return stored_keys


def keys_without_use(model):
    """Return the beginnings of keys that a checkpoint may have although `load` doesn't use them."""
    frozen = [f"optimizer.state.{name}." for name, param in model.named_parameters() if not param.requires_grad]
    return "about", "extra.", *frozen  # version 0.3 wrote "about"


def groups_to_load(state, own_state, optimizer) -> list[dict]:
    """Return the parameter groups of the checkpoint, with the names of parameters and the KEPT_OPTIONS from here.

    state: filled from the checkpoint. own_state: this optimizer's.
    Raises ForeignCheckpoint: a parameter was in another group.
    """
    saved_groups = state["optimizer"]["param_groups"]
    saved_number_of = {}  # name of a parameter -> number of the group that it was in
    for number, saved_group in enumerate(saved_groups):
        saved_number_of.update(dict.fromkeys(saved_group["params"], number))
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
    """Return the parameter group `saved_group`, but with the KEPT_OPTIONS of `own_group` in place of its own."""
    options = {key: value for key, value in saved_group.items() if key not in KEPT_OPTIONS}
    own_options = {key: value for key, value in own_group.items() if key in KEPT_OPTIONS}
    return {**options, **own_options}


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in `folder` with the highest number at the end of its name; None if there is none.

    A checkpoint without such a number, such as "best", doesn't count.
    """
    complete = {}  # (number, name) -> path of the checkpoint
    for metadata_path in Path(folder).glob(f"*/{METADATA}"):
        checkpoint_path = metadata_path.parent
        digits = re.search(r"\d+$", checkpoint_path.name)
        if digits and metadata_path.is_file():
            complete[int(digits[0]), checkpoint_path.name] = checkpoint_path
    return complete[max(complete)] if complete else None
