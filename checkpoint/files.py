"""Checkpoints in files, which torch.distributed.checkpoint writes and reads: with any stage, on any number of ranks.

A checkpoint is a folder that other programs read with torch's own tools. The names in it are those that
torch.distributed.checkpoint.state_dict gives, so an FSDP2 program goes on from it, and the other way round.
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
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from guard.schema import leading_dims_of

from .errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint, UnfitModel
from .optimizers import (
    all_params,
    indexed_groups,
    inner_of,
    install,
    local,
    members_of,
    offsets_of,
    paths_of_common,
    pieces_of,
    prepare,
    saver_for,
    schemas_of,
    unwrapped_optimizer,
)
from .ranks import Saving, all_gather, errors_on_all, rank_and_size
from .states import agree, check_states, filled, flat, local_states
from .storage import (
    METADATA,
    LoadPlanner,
    Reader,
    SavePlanner,
    Writer,
    is_count,
    joined,
    need,
    opened,
    packed,
    range_boxes,
    read_metadata,
    tensor_boxes,
)

SUMS = "checksums.json"  # file -> [bytes, CRC-32]
MANIFEST = "manifest.json"  # what a checkpoint of version 0.2 and before has
STATE, GROUPS = ("optimizer", "state"), ("optimizer", "param_groups")
OF_OPTIMIZER = tuple(f"{joined(path)}." for path in (STATE, GROUPS))  # prefixes of keys
ABOUT = "about"  # key of what `load` needs, and other programs don't
CHUNK = 2**20  # bytes that are read at once
DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # of a disk that can't read what it has
RUN_ID = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # the same when torchrun starts the ranks again
RUN = secrets.token_hex(4) if RUN_ID == "none" else f"{zlib.crc32(RUN_ID.encode()):08x}"
OWN_PARTIALS = set()  # names of folders that this process has made


@torch.no_grad()
def save(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: object = None,
         *, asynchronous: bool = False) -> Future[None]:
    """Write a checkpoint: a folder `path`, which appears when everything is in it. Collective.

    With tensor parallelism all ranks of the mesh call it.

    Args:
        path: doesn't exist yet, and lies where all ranks can write. Until it exists there is a "….partial" beside it.
        model: its parameters and buffers are saved by name, and the optimizer's state by those names. What is not the
            optimizer's is saved as the first rank has it.
        optimizer: a DistributedOptimizer of any stage, guard.chained.Chained, or a torch optimizer, which must not be
            of DTensors. Chained may have experts of smaller process groups if each expert has a name of its own.
        extra: anything more of this rank, such as random states: numbers, texts, bytes, tensors, dtypes, devices, and
            dicts, lists, tuples and sets of these. What parameter groups hold must be like that too.
        asynchronous: copy everything to the CPU, wait for the save before, and write while training goes on.

    Returns a Future: `.result()` waits, and raises what went wrong. Call it before destroy_process_group(). If nobody
    does, the next save raises the error, or Python prints it when it ends.

    Raises, on every rank:
        UnfitModel: `optimizer` is of another model, or the model's state_dict() has copies, or an extra state.
        CheckpointError: `path` exists or can't be written, something can't be read again, an earlier save has failed.
        RuntimeError: a rank doesn't come within the time-out of the process group, or ends while it writes.
    """
    optimizer = unwrapped_optimizer(optimizer)
    saver = saver_for(optimizer)
    error_prefix = f"checkpoint {path} can't be written"
    group = saver.group
    saver.finish_last()
    with errors_on_all(error_prefix, group):
        path, model = Path(path), unwrapped(model)
        tensors = tensors_of(model)
        names, pieces = names_of(tensors, optimizer), pieces_of(optimizer)
        states = local_states(optimizer, pieces)
        groups, own_extra = packed_groups(optimizer), packed(extra, "`extra`")
        report = RankReport(str(path), {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()},
                            names_in_groups(optimizer, names), ranks_of_experts(optimizer, names))
    reports = all_gather(report, group)
    with errors_on_all(error_prefix, group):
        refuse_different(reports)
    layouts = agree(optimizer, states, pieces, names, error_prefix, group)
    rank, _ = rank_and_size(group)
    with errors_on_all(error_prefix, group):
        check_states(schemas_of(optimizer), names, states, {index: piece.main.shape for index, piece in pieces.items()})
        content = {("extra", str(rank)): own_extra}  # where other programs have it in nested dicts -> Boxes or bytes
        if rank == 0:
            for number, options in enumerate(groups):
                options["params"] = packed(all_names(reports)[number], "names")
                for key, value in options.items():
                    content[(*GROUPS, number, key)] = value
            trees = {name: layout.tree for name, layout in layouts.items() if not is_flat(layout.tree)}
            content[(ABOUT,)] = packed({"optimizer": class_of(optimizer), "trees": trees}, "a state")
        add_rest_of_model(content, tensors, layouts, [report.model for report in reports], rank)
        for index, piece in pieces.items():
            add_piece(content, names[index], piece, flat(states[index]), layouts[names[index]], rank)
        if asynchronous:
            content = {path: on_cpu(value) for path, value in content.items()}
    with errors_on_all(error_prefix, group):
        partial = made_partial(path) if rank == 0 else None
    partial = path.with_name(all_gather(partial, group)[0])
    if not asynchronous:
        write(path, partial, content, group)
        done = Future()
        done.set_result(None)
        return done
    saver.last = Saving()
    saver.thread.submit(write_behind, saver.last, path.absolute(), partial.absolute(), content, group)
    return saver.last


class RankReport(NamedTuple):
    """What a rank tells the others of its model and optimizer before they save or load."""

    source: str | int  # the path; of a checkpoint that is loaded, the checksum of its checksums
    model: dict  # name -> (shape, dtype); to load, the names are enough
    names: list[list[str]]  # of the parameters in each group
    experts: dict  # name of a parameter of a smaller process group -> the ranks of that group


def on_cpu(value):
    """Return a copy of Boxes on the CPU; bytes as they are."""
    if isinstance(value, bytes):
        return value
    return value._replace(views={offsets: torch.empty(view.shape, dtype=view.dtype, device="cpu").copy_(view)
                                 for offsets, view in value.views.items()})


def unwrapped(model):
    while isinstance(model, torch.nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def tensors_of(model) -> dict[str, torch.Tensor]:
    """Return model.state_dict() with the tensors themselves, by names that torch.compile hasn't changed.

    Raises UnfitModel: something in it could not be loaded.
    """
    tensors = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = tensors.get(name.replace("_orig_mod.", ""), tensor)
        if value is not tensor and not (isinstance(value, torch.Tensor) and value.data_ptr() == tensor.data_ptr()):
            raise UnfitModel(f"model.state_dict() has a copy of {name}, perhaps made by a hook: it could not be loaded")
    for name, value in tensors.items():
        if name.endswith("_extra_state"):
            raise UnfitModel(f"{name}, of a module's get_extra_state(), isn't kept here: pass it as `extra`")
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise UnfitModel(f"{name} in model.state_dict() is a {kind}, and no tensor: pass it as `extra`")
        if value.layout != torch.strided:
            raise UnfitModel(f"{name} in model.state_dict() is {value.layout}, which isn't kept here")
        offsets_of(value, name)  # raises an error if the DTensor isn't one box
    return tensors


def names_of(tensors, optimizer) -> list[str]:
    """Return the names that the optimizer's parameters have in `tensors_of`, by index."""
    name_of = {}
    for name, value in tensors.items():
        name_of.setdefault(id(value), name)  # the first of tied ones
    names = [name_of.get(id(param)) for param in all_params(optimizer)]
    if None in names:
        raise UnfitModel(f"parameter {names.index(None)} of the optimizer isn't in model.state_dict(): pass the model "
                         "it trains")
    return names


def packed_groups(optimizer) -> list[dict[str, bytes]]:
    return [{key: packed(value, "a parameter group") for key, value in group.items()
             if key not in ("params", "param_names")} for group in optimizer.param_groups]


def names_in_groups(optimizer, names) -> list[list[str]]:
    return [[names[index] for index in group["params"]] for group in indexed_groups(optimizer)]


def all_names(reports) -> list[list[str]]:
    """Return the names of each group, of all ranks: experts of smaller process groups are on some ranks only."""
    return [list(dict.fromkeys(name for names in names_by_rank for name in names))
            for names_by_rank in zip(*(report.names for report in reports))]


def ranks_of_experts(optimizer, names) -> dict[str, list[int]]:
    """Map the names of parameters whose process group is smaller than Chained's to the ranks of that group."""
    names, ranks_by_name = iter(names), {}
    for member, n_ranks in zip(members_of(optimizer), getattr(optimizer, "n_ranks", ())):  # only Chained has these
        ranks = dist.get_process_group_ranks(member.process_group or dist.group.WORLD)
        for param, name in zip(all_params(member), names):
            if n_ranks < optimizer.process_group.size() and not isinstance(param, DTensor):
                ranks_by_name[name] = ranks
    return ranks_by_name


def refuse_different(reports):
    """Raise CheckpointError or UnfitModel unless all ranks save the same model to the same place."""
    first, ranks_by_name = reports[0], {}  # name -> ranks of its process group, or None: that of all ranks
    has_experts = any(report.experts for report in reports)
    for rank, report in enumerate(reports):
        if report.source != first.source:
            raise CheckpointError(f"rank {rank} saves to {report.source}, rank 0 to {first.source}: a path with the "
                                  "time in it must come from one rank")
        if len(report.names) != len(first.names):
            raise UnfitModel(f"rank {rank} has {len(report.names)} parameter groups, rank 0 has {len(first.names)}")
        for name in report.model:
            ranks = report.experts.get(name)
            first_ranks = ranks_by_name.setdefault(name, ranks)
            if ranks != first_ranks:
                raise UnfitModel(f"{name} on ranks {first_ranks} and {ranks} are two parameters of one "
                                 "name: give each expert its global index as name")
        for name in dict.fromkeys([*first.model, *report.model]):
            is_expert = has_experts and not (name in first.model and name in report.model)
            if first.model.get(name) != report.model.get(name) and not is_expert:
                raise UnfitModel(f"the ranks have different models: {name} isn't the same on ranks 0 and {rank}")


def is_flat(tree):
    return isinstance(tree, dict) and not any(tree.values())


def class_of(optimizer):
    return type(inner_of(optimizer)).__name__


def add_rest_of_model(content, tensors, layouts, models, rank):
    """Add what no optimizer updates: of a DTensor the local part, of any other tensor what the first rank has."""
    for name, tensor in tensors.items():
        first = next(owner for owner, model in enumerate(models) if name in model)
        if name not in layouts and (first == rank or isinstance(tensor, DTensor)):
            content["model", name] = tensor_boxes(tensor)


def add_piece(content, name, piece, values, layout, rank):
    """Add the parts of a parameter and its state that no lower rank has, and what isn't cut: DCP takes one rank's."""
    for part in layout.parts:
        if part.rank == rank:
            own = slice(part.start - piece.start, part.stop - piece.start)
            param = local(piece.param).reshape(-1)[part.start : part.stop]
            content["model", name] = range_boxes(param, piece.param, part.start)
            for path, lead in layout.leads.items():
                value = local(values[path]).reshape(*lead, -1)[..., own]
                content[(*STATE, name, *path.split("."))] = range_boxes(value, piece.param, part.start)
    for path, value in values.items():
        if path not in layout.leads:
            is_tensor = isinstance(value, torch.Tensor)
            saved = tensor_boxes(value) if is_tensor else packed(value, f"the state of {name}")
            content[(*STATE, name, *path.split("."))] = saved


# ------------------------------------------------------------------------------------------------------------ writing


def made_partial(path) -> str:
    """Make the folder in which `path` is written until it is complete. Return its name. Only the first rank calls this.

    Removes what this run has left in the folder when it was killed, and no other run's.
    """
    if path.parent.is_file():
        raise NotADirectoryError(errno.ENOTDIR, f"{path.parent} is no folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    run_and_rank = f"{RUN}-{dist.get_rank() if dist.is_initialized() else 0}"
    for left in path.parent.glob(f"*.{run_and_rank}-*.partial"):
        if left.name not in OWN_PARTIALS:
            shutil.rmtree(left, ignore_errors=True)
    refuse_existing(path)
    partial = path.with_name(f"{path.name}.{run_and_rank}-{secrets.token_hex(4)}.partial")
    OWN_PARTIALS.add(partial.name)
    partial.mkdir()
    return partial.name


def refuse_existing(path):
    if path.exists():
        raise FileExistsError(errno.EEXIST, "it exists already")


def write(path, partial, content, group):
    """Write what this rank has to `partial`, then the checksums, and give the folder its name. Collective."""
    error_prefix = f"checkpoint {path} can't be written"
    writer, planner = Writer(partial), SavePlanner(content)
    try:
        with errors_on_all(error_prefix, group):
            if not partial.is_dir():
                words = "the folder that rank 0 has made isn't here: all need the same folder"
                raise FileNotFoundError(errno.ENOENT, words)
        with errors_on_all(error_prefix, group), quiet(group):
            dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
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
    is read before anything is changed: for that moment each rank has the model a second time, on the CPU. A checkpoint
    that torch.distributed.checkpoint has written for FSDP2 or torchtitan is loaded, too; its `extra` is None.

    Raises, on every rank, before anything is changed:
        DamagedCheckpoint: it is damaged, or not complete, or the disk can't read it.
        ForeignCheckpoint: it is of another model or optimizer, or of version 0.2 of this program.
        CheckpointError: anything else.
    """
    optimizer = unwrapped_optimizer(optimizer)
    saver = saver_for(optimizer)
    error_prefix = f"checkpoint {path} can't be loaded"
    group = saver.group
    wait([saver.last])
    with errors_on_all(error_prefix, group, refusal):
        path, model = Path(path), unwrapped(model)
        tensors = tensors_of(model)
        names, pieces = names_of(tensors, optimizer), pieces_of(optimizer)
        stored = Stored(path, *rank_and_size(group))
        report = RankReport(stored.checksum, dict.fromkeys(tensors), names_in_groups(optimizer, names), {})
    reports = all_gather(report, group)

    def read(items):
        """Let each rank read its `items`, key -> Boxes or None. A rank that fails is an error on all of them."""
        with errors_on_all(error_prefix, group, refusal), quiet(group):
            dcp.load({}, storage_reader=Reader(path, stored.metadata), planner=LoadPlanner(items),
                     process_group=group, no_dist=group is None)

    with errors_on_all(error_prefix, group, refusal):
        if len({report.source for report in reports}) > 1:
            raise CheckpointError("the ranks read different checkpoints")
        stored.refuse_other_model(tensors, {name for report in reports for name in report.model})
        values = dict.fromkeys(stored.keys_of_values())
    read(values)
    with errors_on_all(error_prefix, group, refusal):
        own_class = class_of(optimizer)
        about = values.get(ABOUT, {"optimizer": own_class, "trees": {}})
        if about["optimizer"] != own_class:
            raise ForeignCheckpoint(f"it is of {about['optimizer']}, this optimizer is {own_class}")
        groups = stored.groups(values, names_in_groups(optimizer, names), all_names(reports))
        schemas = schemas_of(optimizer, groups)
        new_tensors = {}
        new_states = {}
        items = {}
        items_of_states = {}
        for name, tensor in tensors.items():
            if id(tensor) not in new_tensors:  # tied ones once, by the first of their names
                value = torch.empty(local(tensor).shape, dtype=tensor.dtype, device="cpu")
                new_tensors[id(tensor)] = local(tensor), value
                items[stored.key_of_tensor(name, tensor.dtype)] = tensor_boxes(value, tensor)
        for index, piece in pieces.items():
            common = paths_of_common(schemas[index])
            new_states[index] = stored.room_for_state(names[index], piece, common, values, items_of_states)
    read(items)
    read(items_of_states)  # not together: a main parameter may be read into the model, too
    with errors_on_all(error_prefix, group, refusal):
        states = {index: nested_state(about["trees"].get(names[index]), state) for index, state in new_states.items()}
        check_states(schemas, names, states, {index: piece.main.shape for index, piece in pieces.items()})
        ready = prepare(optimizer, states, groups)
    with errors_on_all(error_prefix, group):
        for tensor, value in new_tensors.values():
            tensor.copy_(value)
        install(optimizer, ready)
    return values.get(stored.key_of_extra)


class Stored:
    """What is in a checkpoint, of this program or of FSDP2 or torchtitan, which have other names for some of it.

    Attributes:
        metadata: DCP's.
        keys: of all tensors and values -> what DCP knows of each.
        checksum: to know whether all ranks read the same.
        states: name of a parameter -> path of a value in its state -> key.
        options: number of a group, or with torchtitan name of a parameter -> hyperparameter -> key.
        key_of_extra: of this rank's `extra`, or of rank 0's.
    """

    def __init__(self, folder, rank, world_size):
        sizes = checked_files(folder, rank, world_size)
        self.metadata = read_metadata(folder, sizes)
        has_sums = (folder / SUMS).exists()
        self.checksum = zlib.crc32((folder / (SUMS if has_sums else METADATA)).read_bytes())
        self.keys = self.metadata.state_dict_metadata
        if ABOUT in self.keys and not has_sums:
            raise DamagedCheckpoint(f"it is not complete: {SUMS} is missing")
        has_prefix = any(key.startswith("model.") for key in self.keys)
        self.prefix = "model." if has_prefix else ""  # torchtitan has none
        n_extras = sum(re.fullmatch(r"extra\.\d+", key) is not None for key in self.keys)
        self.key_of_extra = f"extra.{rank if n_extras == world_size else 0}"
        self.states = {}
        self.options = {}
        paths = self.metadata.planner_data or {}
        for key in [key for key in self.keys if key.startswith(OF_OPTIMIZER)]:
            path = paths.get(key, ())
            if path[:2] not in (STATE, GROUPS):  # torchtitan's
                _, kind, names = key.split(".", 2)
                path = "optimizer", kind, *names.rsplit(".", 1)
            _, kind, name, *path_in_state = path
            keys_by_name = self.states if kind == "state" else self.options
            keys_by_name.setdefault(name, {})[joined(path_in_state)] = key

    def is_tensor(self, key):
        return isinstance(self.keys[key], TensorStorageMetadata)

    def refuse_other_model(self, tensors, names_of_all):
        """Raise ForeignCheckpoint with the first difference between the model and what was saved."""
        saved_tensors = {key.removeprefix(self.prefix): self.keys[key] for key in self.keys
                         if key.startswith(self.prefix) and self.is_tensor(key)}
        missing = [name for name in saved_tensors if name not in names_of_all] if self.prefix else []
        for name in [*tensors, *missing]:
            saved_shape = tuple(saved_tensors[name].size) if name in saved_tensors else None
            model_shape = tuple(tensors[name].shape) if name in tensors else None
            if saved_shape != model_shape:
                raise ForeignCheckpoint(f"it is of another model: {name}: the checkpoint {shape_words(saved_shape)}, "
                                        f"the model {shape_words(model_shape)}")
            saved_dtype, dtype = saved_tensors[name].properties.dtype, tensors[name].dtype
            if saved_dtype != dtype and not (saved_dtype.is_floating_point and dtype.is_floating_point):
                raise ForeignCheckpoint(f"it is of another model: {name} is {saved_dtype} there, {dtype} in the model")

    def keys_of_values(self):
        """Return the keys of everything that is no tensor, and that this rank needs."""
        return [key for key in self.keys if not self.is_tensor(key) and
                (key in (ABOUT, self.key_of_extra) or key.startswith(OF_OPTIMIZER))]

    def groups(self, values, own_names, names_on_all_ranks) -> list[dict]:
        """Return the hyperparameters of each group. Raises ForeignCheckpoint: other parameters are in the groups.

        `own_names`: of the parameters in each group of this rank's optimizer; `names_on_all_ranks`: of all ranks'.
        """
        numbers = sorted(place for place, keys in self.options.items() if "params" in keys)
        groups = []
        saved_names = [values[self.options[number]["params"]] for number in numbers]
        if numbers and [sorted(names) for names in saved_names] != [sorted(names) for names in names_on_all_ranks]:
            raise ForeignCheckpoint(f"its parameter groups are {summary(saved_names)}, this optimizer's "
                                    f"{summary(own_names)}")
        for places in [[number] for number in numbers] or own_names:  # torchtitan has a group for each parameter
            saved = [{option: values[key] for option, key in self.options.get(place, {}).items()} for place in places]
            if any(repr(group) != repr(saved[0]) for group in saved):  # repr: values may be tensors, or nan
                raise ForeignCheckpoint(f"the parameters of one group, {summary([places])}, were in several groups")
            groups.append({key: value for group in saved[:1] for key, value in group.items() if key != "params"})
        return groups

    def key_of_tensor(self, name, dtype):
        """Return the key of a tensor of the model, or of its fp32 main parameter, so that it is rounded once only."""
        key = f"{self.prefix}{name}"
        main = self.states.get(name, {}).get("main_param")
        if main and self.keys[key].properties.dtype != dtype and self.keys[main].size == self.keys[key].size:
            return main
        return key

    def room_for_state(self, name, piece, common, values, items):
        """Return path -> value in the state of a piece; of tensors, memory for them, which `items` then has, too.

        `common`: paths of what isn't cut, whatever its shape says.
        """
        state, keys = {}, dict(self.states.get(name, {}))
        main_key = keys.pop("main_param", f"{self.prefix}{name}")
        if piece.has_main_param:
            keys["main_param"] = main_key
        for path, key in keys.items():
            if not self.is_tensor(key):
                state[path] = values[key]
                continue
            size, dtype = self.keys[key].size, self.keys[key].properties.dtype
            lead = leading_dims_of(size, piece.param.shape)
            if key == main_key:
                dtype = piece.main.dtype
            if lead is None or path in common:
                state[path] = torch.empty(size, dtype=dtype, device="cpu")
                items[key] = tensor_boxes(state[path])
            else:
                state[path] = torch.empty((*lead, *piece.main.shape), dtype=dtype, device="cpu")
                items[key] = range_boxes(state[path].view(*lead, -1), piece.param, piece.start)
        return state


def nested_state(tree, state):
    """Return a `state`, path -> value, with its dicts and lists. `tree`: of `tree_of` when it was saved, if it had any.
    """
    tree = dict(tree or dict.fromkeys(state))
    tree.pop("main_param", None)  # where it was saved is known, and where it is needed may be another matter
    if "main_param" in state:
        tree["main_param"] = None
    return filled(tree, state)


@contextlib.contextmanager
def quiet(group):
    """Leave out DCP's warning that a program without process groups has none."""
    with warnings.catch_warnings():
        if group is None:
            warnings.simplefilter("ignore", UserWarning)
        yield


def shape_words(shape):
    return "doesn't have it" if shape is None else f"has it with shape {shape}"


def summary(groups):
    return " and ".join(f"{len(names)} from {names[0]} to {names[-1]}" if names else "an empty one" for names in groups)


def refusal(error):
    """Return the error as that of a checkpoint: what doesn't fit is foreign; what the disk can't read is damaged."""
    if isinstance(error, ValueError) and not isinstance(error, CheckpointError):
        return ForeignCheckpoint(str(error))
    return DamagedCheckpoint(error.strerror) if getattr(error, "errno", None) in DISK_ERRORS else error


def checked_files(folder, rank, world_size) -> dict[str, int]:
    """Return file -> its number of bytes, of all files of a checkpoint. This rank checks the sums of its share of them.

    Raises DamagedCheckpoint: one is missing or was changed. ForeignCheckpoint: version 0.2 has written it.
    """
    if not folder.is_dir():
        raise DamagedCheckpoint("there is no such folder")
    if (folder / MANIFEST).exists() and not (folder / METADATA).exists():
        raise ForeignCheckpoint("version 0.2 or an earlier one has written it: load it with that version")
    if not (folder / METADATA).exists():
        raise DamagedCheckpoint(f"it is not complete: {METADATA} is missing")
    if not (folder / SUMS).exists():  # another program has written it
        return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    sums = read_sums(folder)
    for number, (name, (n_bytes, crc)) in enumerate(sorted(sums.items())):
        with opened(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            need(size == n_bytes, f"{n_bytes} bytes were written, now it is {size} bytes")
            if number % world_size == rank:
                checksum = checksum_of_file(file)
                need(checksum == crc, f"its checksum was {crc:08x}, now it is {checksum:08x}")
    return {name: n_bytes for name, (n_bytes, _) in sums.items()}


def read_sums(folder):
    with opened(folder / SUMS) as file:
        sums = json.load(file)
        need(type(sums) is dict, "it is no dict")
        for name, (n_bytes, crc) in sums.items():
            need(name not in ("", ".", "..") and "/" not in name and "\0" not in name, f"file {name!r:.60}")
            need(is_count(n_bytes) and is_count(crc), f"the sum of {name!r:.60}")
        return sums


def checksum_of_file(file):
    crc = 0
    while content := file.read(CHUNK):
        crc = zlib.crc32(content, crc)
    return crc


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in `folder` with the highest number at the end of its name; None without any.

    Names without such a number, such as best, don't count.
    """
    complete = {path.parent for name in (METADATA, MANIFEST) for path in Path(folder).glob(f"*/{name}")
                if path.is_file() and re.search(r"\d$", path.parent.name)}
    return max(complete, key=lambda path: (int(re.search(r"\d+$", path.name)[0]), path.name), default=None)
