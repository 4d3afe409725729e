"""Saves checkpoints in files and loads them, by torch.distributed.checkpoint (DCP): torch's own lines made safe.

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

`save` adds three things to these lines. It writes checksums, it turns an error on one rank into an error on all ranks,
and the folder gets its name only when it is complete. `load` changes nothing before everything was read and fits. The
folders have DCP's format, so a program with torch's lines can read them, and `load` can read what programs with FSDP2
have written.

    stage's optimizer    one of this project's distributed optimizers: each rank has a part of the state
    Chained              joins several of these optimizers into one
    Saver                has the process groups for messages between the ranks that save together (ranks.py)
    key                  the name of a value in a checkpoint, which is flat, such as "model.layer.weight"
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

# Entries of a parameter group that `save` writes, and `load` doesn't use: the optimizer keeps the values that it has.
# They say how this process computes, or what this model calls its parameters.
KEPT_OPTIONS = {"fused", "foreach", "capturable", "differentiable", "param_names"}
DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # errors of a disk that can't read its own content


@torch.no_grad()
def save(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: object = None,
         *, asynchronous: bool = False) -> Future[None]:
    """Write a checkpoint: a folder `path`, which appears when it is complete. Collective.

    With tensor parallelism all ranks of the mesh call this function.

    Args:
        path: a path that doesn't exist yet, in a folder where all ranks can write. Until the checkpoint is complete,
            a folder "….partial" is beside it.
        model: if several ranks have a parameter, the values of the first of these ranks are saved.
        optimizer: a DistributedOptimizer of any stage, guard.chained.Chained, or a torch optimizer. A Chained may have
            optimizers of experts, with smaller process groups, if the parameters of each expert have names of their
            own.
        extra: anything else that this rank needs again, such as random states: numbers, texts, bytes, tensors, dtypes,
            devices, and dicts, lists, tuples and sets of these. Hyperparameters must be of these kinds, too.
        asynchronous: wait for the previous save, copy everything to the CPU, and write while training goes on.

    Returns a Future: `.result()` waits for the save to end, and raises its error. Call it before
    destroy_process_group(). If nobody calls it, the next save raises the error. The error is also printed at once.

    Raises, on every rank:
        UnfitModel: `optimizer` is of another model, or two ranks have different parameters of one name.
        CheckpointError: `path` exists or can't be written, or a value is of a kind that `load` couldn't read, or an
            earlier asynchronous save has failed.
        RuntimeError: a rank doesn't call `save` within the time-out of the process group, or ends while it writes.
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
    """Return the stage's optimizer in `optimizer`, if this is a wrapper of accelerate, Lightning or Fabric.

    Otherwise return `optimizer`.

    A wrapper has an attribute `optimizer`: a stage's optimizer, or another wrapper. (A stage's optimizer has such an
    attribute, too: a torch optimizer.)
    """
    inner = getattr(optimizer, "optimizer", None)
    # A stage's optimizer has the method `pieces`, and a Chained has the attribute `n_ranks`.
    is_wrapper = hasattr(inner, "pieces") or hasattr(inner, "n_ranks")
    return unwrapped_optimizer(inner) if is_wrapper else optimizer


def saver_for(optimizer) -> Saver:
    """Return the Saver of all ranks that share the model. Collective.

    They are the ranks of the optimizer's process group and of the device meshes of DTensors. The Saver has a process
    group for messages between these ranks, and the thread that writes asynchronous saves.
    """
    dtensors = [param for param in all_params(optimizer) if isinstance(param, DTensor)]
    meshes = dict.fromkeys(param.device_mesh for param in dtensors)  # each mesh once, in the same order on all ranks
    return saver_of(getattr(optimizer, "process_group", None), meshes)


def state_to_save(path, model, optimizer, extra, is_copied, group) -> dict:
    """Return what this rank saves: {"model": state_dict, "optimizer": state_dict, "extra": {rank: bytes}}. Collective.

    is_copied: whether the dict has copies of all tensors, on the CPU. Otherwise it has the program's tensors.

    Raises an error on every rank if the ranks don't all save the same model to `path`, or if a state can't be saved.
    """
    error_prefix = f"checkpoint {path} can't be written"
    rank, _ = rank_and_size(group)
    with errors_on_all(error_prefix, group):
        state = torchs_state(model, optimizer)
        state["extra"] = {str(rank): packed(extra)}  # so the keys in the checkpoint are "extra.0", "extra.1" and so on
        if is_copied:
            state = tree_map_only(torch.Tensor, copy_on_cpu, state)
        facts = facts_to_agree_on(path, model, optimizer, state["model"])
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    with errors_on_all(error_prefix, group):
        refuse_different(all_gather(facts, group))
    return state


def torchs_state(model, optimizer, options=None) -> dict:
    """Return {"model": state_dict of `model`, "optimizer": state_dict of `optimizer`}, by torch's get_state_dict().

    Raises UnfitModel: the optimizer has a parameter that isn't the model's, or a state of something else.
    """
    params_of_model = set(model.parameters())
    for key in [*all_params(optimizer), *optimizer.state]:  # a state has a parameter as its key, or anything else
        if key not in params_of_model:
            name = f"of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise UnfitModel(f"the optimizer has a parameter or state {name:.60}, which isn't the model's: pass the "
                             "model that it trains, and keep a state of no parameter elsewhere")
    had_state = bool(optimizer.state)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if not had_state:
        # A plain torch optimizer had no state, so get_state_dict() has stepped it with gradients of zeros. Undo that.
        optimizer.state.clear()
    return {"model": model_state, "optimizer": optimizer_state}


def copy_on_cpu(tensor):
    """Return a copy of `tensor` on the CPU, also if `tensor` is there already."""
    return tensor.detach().to("cpu", copy=True)


def facts_to_agree_on(path, model, optimizer, model_state) -> dict:
    """Return a dict: name -> a fact about this save. If two ranks have facts of one name, these must be equal.

    Facts are the path, the number of parameter groups, and, under the name of each tensor of the model, its shape. For
    a parameter of an expert the fact also has the ranks that have this expert.
    """
    names = {param: name for name, param in model.named_parameters()}
    ranks_of_expert = {}  # name of an expert's parameter -> the ranks that have this expert
    if hasattr(optimizer, "n_ranks"):  # a Chained. `n_ranks`: for each of its optimizers the number of its ranks
        for member, n_ranks in zip(optimizer.optimizers, optimizer.n_ranks):
            if n_ranks < max(optimizer.n_ranks):  # an optimizer of experts, which some ranks don't have
                ranks = dist.get_process_group_ranks(member.process_group)
                for param in all_params(member):
                    if not isinstance(param, DTensor):  # a DTensor has parts on ranks of several process groups
                        ranks_of_expert[names[param]] = ranks
    facts = {"the path": str(path), "the number of parameter groups": len(optimizer.param_groups)}
    for name, value in model_state.items():
        if isinstance(value, torch.Tensor):
            of_ranks = f" of ranks {ranks_of_expert[name]}" if name in ranks_of_expert else ""
            facts[name] = f"a tensor of shape {tuple(value.shape)}{of_ranks}"
    return facts


def refuse_different(facts_of_ranks):
    """Raise UnfitModel if two ranks have different facts under one name.

    facts_of_ranks: for each rank what its `facts_to_agree_on` has returned.
    """
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
    token, *_ = all_gather(secrets.token_hex(4), group)  # a random text, the first rank's on all ranks
    partial = path.with_name(f"{path.name}.{token}.partial")
    with errors_on_all(f"checkpoint {path} can't be written", group):
        if rank_and_size(group)[0] == 0:  # the first rank
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
        # `writer.fs.sums` has the checksums of the files that this rank has written.
        for sums_of_rank in all_gather(writer.fs.sums, group):
            sums.update(sums_of_rank)
        with errors_on_all(error_prefix, group):
            if rank_and_size(group)[0] == 0:  # the first rank
                finish(path, partial, sums)
    # After these errors no rank writes any more. After a time-out, another error, other ranks may still be writing.
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def finish(path, partial, sums):
    """Write the checksums into the folder `partial`, and rename it to `path`. The first rank calls this function.

    sums: name of each file -> (size in bytes, CRC-32).
    """
    for name in sums:
        if not (partial / name).is_file():
            raise FileNotFoundError(errno.ENOENT, f"{name} of another rank isn't here: all need the same folder")
    with open(partial / SUMS, "w") as file:
        json.dump(sums, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)  # an error if a folder `path` with files exists now, which another program has made meanwhile


# ------------------------------------------------------------------------------------------------------------ loading


@torch.no_grad()
def load(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Read a checkpoint into `model` and `optimizer`: each rank reads the parts that it needs. Collective.

    Returns the `extra` that this rank has passed to `save`, with tensors on the CPU. If the number of ranks isn't what
    it was then, every rank gets the `extra` of rank 0. A checkpoint that torch's own lines have written for FSDP2 is
    loaded, too. It has no `extra`, so None is returned.

    Everything is read before anything is changed. So for a moment each rank has its part of the model and of the state
    a second time, on the CPU.

    Raises, on every rank, before anything is changed:
        DamagedCheckpoint: the checkpoint is damaged, or not complete, or the disk can't read it.
        ForeignCheckpoint: it is of another model or optimizer, or has keys that nothing here uses.
        CheckpointError: there was any other error.
    """
    optimizer = unwrapped_optimizer(optimizer)
    saver = saver_for(optimizer)
    group = saver.group
    # When a `with` block below ends, an error on any rank becomes a CheckpointError on all ranks. A new block begins
    # before each step that no rank may take unless all ranks have come so far.
    failing_together = functools.partial(errors_on_all, f"checkpoint {path} can't be loaded", group,
                                         as_checkpoint_error)
    wait([saver.last])  # until the last asynchronous save has ended. If it has failed, the next save raises the error
    with failing_together():
        reader = Reader(Path(path), *rank_and_size(group))  # the second and third arguments: rank, number of ranks
    with failing_together():
        if len(set(all_gather(reader.checksum, group))) > 1:
            raise CheckpointError("the ranks read different checkpoints")
        options = StateDictOptions(flatten_optimizer_state_dict=is_flattened(reader.metadata))
        own_state = torchs_state(model, optimizer, options)
        state = memory_for(own_state, reader.metadata, group)
        stored_keys = keys_in_checkpoint(state, reader.metadata)
        # DCP looks up the keys of `state`, so let the metadata have these keys in place of the checkpoint's.
        reader.metadata = renamed(reader.metadata, stored_keys)
    with failing_together():
        planner = LoadPlanner(keys_without_use(model))
        # This collective fills the tensors of `state`, and replaces other values in it.
        dcp.load(state, storage_reader=reader, planner=planner, process_group=group)
        if not options.flatten_optimizer_state_dict:
            state["optimizer"]["param_groups"] = groups_to_load(state, own_state, optimizer)
    with failing_together():
        if options.flatten_optimizer_state_dict:  # torch's function loads this form, too
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        else:
            optimizer.load_state_dict(state["optimizer"])
        set_model_state_dict(model, state["model"])
    (extra,) = state.get("extra", {"": None}).values()  # the dict has a single entry, see memory_for()
    return extra


def as_checkpoint_error(error):
    """Return an error of a subclass of CheckpointError if the cause of `error` is known. Otherwise return `error`.

    If a value doesn't fit, the checkpoint is foreign. If a pickle or a disk can't be read, the checkpoint is damaged.
    """
    if isinstance(error, (ValueError, KeyError)) and not isinstance(error, CheckpointError):
        return ForeignCheckpoint(f"it is of another model or optimizer: {error}")
    if isinstance(error, pickle.UnpicklingError):  # without torch's text, which says how to run code in the pickle
        return DamagedCheckpoint("a tensor is damaged: it is no plain value")
    if getattr(error, "errno", None) in DISK_ERRORS:
        return DamagedCheckpoint(error.strerror)
    return error


def is_flattened(metadata):
    """Return whether the checkpoint has the optimizer's state in torch's *flattened* form.

    In this form the state is one dict without dicts in it, with keys such as "state.layer.weight.exp_avg". Each
    parameter has hyperparameters of its own, such as "param_groups.layer.weight.lr".

    metadata: DCP's description of the checkpoint.
    """
    # For each value its keys in the nested dicts that were saved: ("optimizer", "state", name, "exp_avg"), or in the
    # flattened form ("optimizer", "state.layer.weight.exp_avg").
    places = (metadata.planner_data or {}).values()
    return any(place[0] == "optimizer" and len(place) == 2 for place in places)


def memory_for(own_state, metadata, group) -> dict:
    """Return a dict for DCP to fill: like `own_state`, with memory on the CPU in place of each tensor.

    Its parameter groups have the hyperparameters that the checkpoint has. If a rank has saved an `extra`, the dict has
    an entry "extra".
    """
    stored = metadata.state_dict_metadata  # key -> DCP's description of the value
    state = tree_map_only(torch.Tensor, empty_on_cpu, own_state)
    # Where a tensor of the model lies -> its memory on the CPU, so that tied tensors get the same memory.
    memory_of = {}
    for name, tensor in own_state["model"].items():
        if isinstance(tensor, torch.Tensor):
            # In an expanded tensor a stride is 0, so several elements have the same memory.
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
                raise UnfitModel(f"{name} is expanded, so nothing can be copied into it: make it contiguous()")
            if tensor.data_ptr():  # it is 0 if the tensor has no elements, or no memory of its own
                memory = state["model"][name]
                place = tensor.data_ptr(), tensor.shape, tensor.stride()
                state["model"][name] = memory_of.setdefault(place, memory)
    rank, n_ranks = rank_and_size(group)
    n_extras = len([key for key in stored if re.fullmatch(r"extra\.\d+", key)])
    if n_extras:
        source = rank if n_extras == n_ranks else 0  # the rank whose `extra` this rank reads
        state["extra"] = {str(source): None}
    if is_flattened(metadata):
        for key in list(state["optimizer"]):
            if key.startswith("param_groups.") and f"optimizer.{key}" not in stored:
                del state["optimizer"][key]  # a hyperparameter that the checkpoint doesn't have
    else:
        numbers = range(len(own_state["optimizer"]["param_groups"]))
        state["optimizer"]["param_groups"] = [options_to_read(number, stored) for number in numbers]
    return state


def empty_on_cpu(tensor):
    """Return uninitialized memory for `tensor` on the CPU. The memory for a DTensor is on the DTensor's device."""
    return torch.empty_like(tensor, device=tensor.device if isinstance(tensor, DTensor) else "cpu")


def options_to_read(number, stored) -> dict:
    """Return a dict for DCP to fill with the hyperparameters of group `number`.

    It has memory for each tensor, and None for each hyperparameter of another kind.
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
        first_words = dict.fromkeys(key.partition(".")[0] for key in stored)  # each word once, in order
        raise ForeignCheckpoint(f"it has {number} parameter groups under optimizer, and more are here: its keys begin "
                                f"with {', '.join(first_words)}")
    return options


def keys_in_checkpoint(state, metadata) -> dict[str, str]:
    """Return a dict: key of `state` -> key in the checkpoint, for the model's tensors and for main parameters.

    A main parameter is the fp32 tensor that an optimizer steps in place of a 16-bit parameter of the model.
    - Only the optimizer here has main parameters: they are read from the model in the checkpoint.
    - Only the checkpoint has main parameters: the model is read from them.
    - Both have them, and the model has another dtype here than in the checkpoint: the model is read from them, too, so
      that values are rounded only once.

    In a checkpoint of torchtitan the model's keys don't begin with "model.".
    """
    stored = metadata.state_dict_metadata
    own_keys, _ = flatten_state_dict(state)  # a flat dict; only its keys are used
    # Whether the names of the model's tensors are keys, as in torchtitan.
    is_at_the_top = any(name in stored and f"model.{name}" not in stored for name in state["model"])
    stored_keys = {}
    # id of a parameter's memory -> key of the main parameter from which it is read. Tied parameters share one memory.
    main_key_of = {}
    for name, memory in state["model"].items():
        model_key = name if is_at_the_top else f"model.{name}"
        main_key = f"optimizer.state.{name}.main_param"
        has_main_param = main_key in own_keys  # whether the optimizer here has a main parameter of this parameter
        if has_main_param:
            stored_keys[main_key] = main_key if main_key in stored else model_key
        # If the model's parameter is read from the main parameter in the checkpoint (see above), note that key.
        if main_key in stored:
            if not has_main_param or stored[model_key].properties.dtype != memory.dtype:
                main_key_of[id(memory)] = main_key
        stored_keys[f"model.{name}"] = main_key_of.get(id(memory), model_key)
    return stored_keys


def keys_without_use(model):
    """Return the beginnings of keys that a checkpoint may have although `load` doesn't use them.

    They are the state of parameters that are frozen here, the `extra` of other ranks, and what version 0.3 wrote.
    """
    frozen = [f"optimizer.state.{name}." for name, param in model.named_parameters() if not param.requires_grad]
    return "about", "extra.", *frozen  # "about" is of version 0.3


def groups_to_load(state, own_state, optimizer) -> list[dict]:
    """Return the parameter groups of the checkpoint, with the names of parameters and the KEPT_OPTIONS of `optimizer`.

    state: the dict that was filled from the checkpoint.
    own_state: the state_dicts of the model and of `optimizer`, as they are now.
    Raises ForeignCheckpoint: a parameter is in another group than it was when it was saved.
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
    """Return a copy of `saved_group`, a parameter group, with the KEPT_OPTIONS of `own_group` in place of its own."""
    options = {key: value for key, value in saved_group.items() if key not in KEPT_OPTIONS}
    own_options = {key: value for key, value in own_group.items() if key in KEPT_OPTIONS}
    return {**options, **own_options}


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the path of the complete checkpoint in `folder` whose name ends in the highest number.

    A checkpoint whose name doesn't end in a number, such as "best", doesn't count. None: there is no such checkpoint.
    """
    complete = {}  # (number, name) -> path of the checkpoint
    for metadata_path in Path(folder).glob(f"*/{METADATA}"):
        checkpoint_path = metadata_path.parent
        digits = re.search(r"\d+$", checkpoint_path.name)
        if digits and metadata_path.is_file():
            complete[int(digits[0]), checkpoint_path.name] = checkpoint_path
    return complete[max(complete)] if complete else None
