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

from guard.schema import lead_of

from .errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint, UnfitModel
from .optimizers import (
    all_params,
    indexed_groups,
    inner_of,
    install,
    itself,
    local,
    members_of,
    offsets_of,
    paths_of_common,
    pieces_of,
    prepared,
    saver_for,
    schemas_of,
)
from .ranks import Saving, all_gather, errors_on_all, first_line, rank_and_size
from .states import agree, check_states, filled, flat, local_states, path_of
from .storage import (
    METADATA,
    Boxes,
    LoadPlanner,
    Reader,
    SavePlanner,
    Writer,
    boxes,
    is_count,
    need,
    packed,
    read_metadata,
    whole,
)

SUMS = "checksums.json"  # file -> [bytes, CRC-32]
MANIFEST = "manifest.json"  # what a checkpoint of version 0.2 and before has
STATE, GROUPS = ("optimizer", "state"), ("optimizer", "param_groups")
ABOUT = "about"  # key of what `load` needs, and other programs don't
CHUNK = 2**20  # bytes that are read at once
DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # of a disk that can't read what it has
RUN = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # the same when torchrun starts the ranks again
RUN = f"{zlib.crc32(RUN.encode()):08x}" if RUN != "none" else secrets.token_hex(4)
OWN_PARTIALS = set()  # names of folders that this process has made


@torch.no_grad()
def save(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: object = None,
         *, asynchronous: bool = False) -> Future[None]:
    """Write a checkpoint: a folder `path`, which appears when everything is in it. Collective; of a tensor-parallel
    model over all ranks of its mesh.

    Args:
        path: a folder that doesn't exist, where all ranks can write; until it does, there is a "….partial" beside it.
        model: its parameters and buffers are saved by name, and the optimizer's state by those names. What is not the
            optimizer's is saved as the first rank has it.
        optimizer: a DistributedOptimizer of any stage, guard.chained.Chained, or a torch optimizer, which must not be
            of DTensors. Chained may have experts of smaller process groups if each expert has a name of its own.
        extra: anything more of this rank, such as random states: numbers, texts, bytes, tensors, dtypes, devices, and
            dicts, lists, tuples and sets of these. What parameter groups hold must be like that too.
        asynchronous: copy everything to the CPU, wait for the save before, and write while training goes on.

    Returns a Future: `.result()` waits, and raises what went wrong; call that of the last one before
    destroy_process_group(). Where nobody does, the next save raises it, or a line says it when Python ends.

    Raises, on every rank:
        UnfitModel: `optimizer` is of another model, or the model's state_dict() has copies, or an extra state.
        CheckpointError: `path` exists or can't be written, something can't be read again, an earlier save has failed.
        RuntimeError: a rank doesn't come within the time-out of the process group, or ends while it writes.
    """
    optimizer = itself(optimizer)
    saver, what = saver_for(optimizer), f"checkpoint {path} can't be written"
    group = saver.group
    saver.finish_last()
    with errors_on_all(what, group):
        path, model = Path(path), unwrapped(model)
        tensors = tensors_of(model)
        names, pieces = names_of(tensors, optimizer), pieces_of(optimizer)
        states = local_states(optimizer, pieces)
        groups, own_extra = packed_groups(optimizer), packed(extra, "`extra`")
        report = Report(str(path), {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()},
                        names_in_groups(optimizer, names), ranks_of_experts(optimizer, names))
    everyone = all_gather(report, group)
    with errors_on_all(what, group):
        refuse_different(everyone)
    layouts = agree(optimizer, states, pieces, names, what, group)
    rank, _ = rank_and_size(group)
    with errors_on_all(what, group):
        check_states(schemas_of(optimizer), names, states, {index: piece.main.shape for index, piece in pieces.items()})
        content = Content({}, {})
        content.add(("extra", str(rank)), own_extra)
        if rank == 0:
            for number, options in enumerate(groups):
                options["params"] = packed(all_names(everyone)[number], "names")
                for key, value in options.items():
                    content.add((*GROUPS, number, key), value)
            trees = {name: layout.tree for name, layout in layouts.items() if not is_plain(layout.tree)}
            content.add((ABOUT,), packed({"optimizer": class_of(optimizer), "trees": trees}, "a state"))
        add_rest_of_model(content, tensors, layouts, [of_rank.model for of_rank in everyone], rank)
        for index, piece in pieces.items():
            add_piece(content, names[index], piece, flat(states[index]), layouts[names[index]], rank)
        if asynchronous:
            content.copy_to_cpu()
    with errors_on_all(what, group):
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


class Report(NamedTuple):
    """What a rank tells the others of its model and optimizer before they save."""

    path: str
    model: dict  # name -> shape, dtype
    names: list[list[str]]  # of the parameters in each group
    experts: dict  # name of a parameter of a smaller process group -> the ranks of that


class Content(NamedTuple):
    """What this rank writes: key -> Boxes or bytes; key -> place in nested dicts, for torch's converters."""

    items: dict
    paths: dict

    def add(self, path, value):
        self.items[path_of(path)], self.paths[path_of(path)] = value, path

    def copy_to_cpu(self):
        for key, value in self.items.items():
            if isinstance(value, Boxes):
                self.items[key] = value._replace(views={
                    offsets: torch.empty(view.shape, dtype=view.dtype, device="cpu").copy_(view)
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
            raise UnfitModel(f"model.state_dict() has a copy of {name}, made by a hook say: it could not be loaded")
    for name, value in tensors.items():
        if name.endswith("_extra_state"):
            raise UnfitModel(f"{name}, of a module's get_extra_state(), isn't kept here: pass it as `extra`")
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise UnfitModel(f"{name} in model.state_dict() is a {kind}, and no tensor: pass it as `extra`")
        if value.layout != torch.strided:
            raise UnfitModel(f"{name} in model.state_dict() is {value.layout}, which isn't kept here")
        offsets_of(value, name)  # or the error that says how it can't be cut
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


def all_names(everyone) -> list[list[str]]:
    """Return the names of each group, of all ranks: experts of smaller process groups are on some ranks only."""
    return [list(dict.fromkeys(name for names in of_ranks for name in names))
            for of_ranks in zip(*(of_rank.names for of_rank in everyone))]


def ranks_of_experts(optimizer, names) -> dict[str, list[int]]:
    """Return the name of each parameter of a smaller process group than Chained's -> the ranks of that group."""
    names, ranks_by_name = iter(names), {}
    for member, n_ranks in zip(members_of(optimizer), getattr(optimizer, "n_ranks", [0])):
        ranks = dist.get_process_group_ranks(member.process_group or dist.group.WORLD) if n_ranks else []
        for param in all_params(member):
            name = next(names)
            if n_ranks and n_ranks < optimizer.process_group.size() and not isinstance(param, DTensor):
                ranks_by_name[name] = ranks
    return ranks_by_name


def refuse_different(everyone):
    """Raise CheckpointError or UnfitModel unless all ranks save the same model to the same place."""
    first, ranks_of = everyone[0], {}  # name -> ranks of its process group, if that is a smaller one
    has_experts = any(of_rank.experts for of_rank in everyone)
    for rank, of_rank in enumerate(everyone):
        if of_rank.path != first.path:
            raise CheckpointError(f"rank {rank} saves to {of_rank.path}, rank 0 to {first.path}: a path with the time "
                                  "in it must come from one rank")
        if len(of_rank.names) != len(first.names):
            raise UnfitModel(f"rank {rank} has {len(of_rank.names)} parameter groups, rank 0 has {len(first.names)}")
        for name in of_rank.model:
            ranks = ranks_of.setdefault(name, of_rank.experts.get(name))
            if of_rank.experts.get(name) != ranks:
                raise UnfitModel(f"{name} on ranks {ranks} and {of_rank.experts.get(name)} are two parameters of one "
                                 "name: give each expert its global index as name")
        for name in dict.fromkeys([*first.model, *of_rank.model]):
            is_expert = has_experts and not (name in first.model and name in of_rank.model)
            if first.model.get(name) != of_rank.model.get(name) and not is_expert:
                raise UnfitModel(f"the ranks have different models: {name} isn't the same on ranks 0 and {rank}")


def is_plain(tree):
    return isinstance(tree, dict) and not any(tree.values())


def class_of(optimizer):
    return type(inner_of(optimizer)).__name__


def add_rest_of_model(content, tensors, layouts, models, rank):
    """Add what no optimizer updates: of a DTensor the local part, of any other tensor what the first rank has."""
    for name, tensor in tensors.items():
        first = next(owner for owner, model in enumerate(models) if name in model)
        if name not in layouts and (first == rank or isinstance(tensor, DTensor)):
            content.add(("model", name), whole(tensor))


def add_piece(content, name, piece, values, layout, rank):
    """Add the parts of a parameter and its state of which this rank is the first that has them."""
    for part in layout.parts:
        if part.rank == rank:
            own = slice(part.start - piece.start, part.stop - piece.start)
            param = local(piece.param).reshape(-1)[part.start : part.stop]
            content.add(("model", name), boxes(param, piece.param, part.start))
            for path, entry in layout.cut.items():
                value = local(values[path]).reshape(*entry.lead, -1)[..., own]
                content.add((*STATE, name, *path.split(".")), boxes(value, piece.param, part.start))
    for path, (first, _) in layout.common.items():
        if first == rank:
            value = values[path]
            content.add((*STATE, name, *path.split(".")),
                        whole(value) if isinstance(value, torch.Tensor) else packed(value, f"the state of {name}"))


# ------------------------------------------------------------------------------------------------------------ writing


def made_partial(path) -> str:
    """Make the folder in which `path` is written until it is complete. Return its name. On the first rank.

    Removes what this run has left in the folder when it was killed, and no other run's.
    """
    if path.parent.is_file():
        raise NotADirectoryError(errno.ENOTDIR, f"{path.parent} is no folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    own = f"{RUN}-{dist.get_rank() if dist.is_initialized() else 0}-"
    for left in path.parent.glob(f"*.{own}????????.partial"):
        if left.name not in OWN_PARTIALS:
            shutil.rmtree(left, ignore_errors=True)
    refuse_existing(path)
    partial = path.with_name(f"{path.name}.{own}{secrets.token_hex(4)}.partial")
    OWN_PARTIALS.add(partial.name)
    partial.mkdir()
    return partial.name


def refuse_existing(path):
    if path.exists():
        raise FileExistsError(errno.EEXIST, "it exists already")


def write(path, partial, content, group):
    """Write what this rank has to `partial`, then the checksums, and give the folder its name. Collective."""
    what = f"checkpoint {path} can't be written"
    writer, planner = Writer(partial), SavePlanner(*content)
    try:
        with errors_on_all(what, group):
            if not partial.is_dir():
                words = "the folder that rank 0 has made isn't here: all need the same folder"
                raise FileNotFoundError(errno.ENOENT, words)
        with errors_on_all(what, group):
            with quiet(group):
                dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
        everyone = all_gather(writer.fs.sums, group)
        with errors_on_all(what, group):
            if rank_and_size(group)[0] == 0:
                finish(path, partial, {name: sums for of_rank in everyone for name, sums in of_rank.items()})
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
    """Read a checkpoint into `model` and `optimizer`, each rank what it needs. Collective. -> `extra` as it was saved.

    On another number of ranks than it was saved on, `extra` is that of rank 0. Its tensors are on the CPU. Everything
    is read before anything is changed: for that moment each rank has the model a second time, on the CPU. A checkpoint
    that torch.distributed.checkpoint has written for FSDP2 or torchtitan is loaded, too; its `extra` is None.

    Raises, on every rank, before anything is changed:
        DamagedCheckpoint: it is damaged, or not complete, or the disk can't read it.
        ForeignCheckpoint: it is of another model or optimizer, or of version 0.2 of this program.
        CheckpointError: anything else.
    """
    optimizer = itself(optimizer)
    saver, what = saver_for(optimizer), f"checkpoint {path} can't be loaded"
    group = saver.group
    wait([saver.last])
    with errors_on_all(what, group, refusal):
        path, model = Path(path), unwrapped(model)
        tensors = tensors_of(model)
        names, pieces = names_of(tensors, optimizer), pieces_of(optimizer)
        stored = Stored(path, *rank_and_size(group))
        report = Report(stored.checksum, dict.fromkeys(tensors), names_in_groups(optimizer, names), {})
    everyone = all_gather(report, group)

    def read(items):
        """Let each rank read its `items`, key -> Boxes or None. A rank that fails is an error on all of them."""
        with errors_on_all(what, group, refusal):
            with quiet(group):
                dcp.load({}, storage_reader=Reader(path, stored.metadata), planner=LoadPlanner(items),
                         process_group=group, no_dist=group is None)

    with errors_on_all(what, group, refusal):
        if len({of_rank.path for of_rank in everyone}) > 1:
            raise CheckpointError("the ranks read different checkpoints")
        stored.refuse_other_model(tensors, {name for of_rank in everyone for name in of_rank.model})
        values = dict.fromkeys(stored.keys_of_values(names))
    read(values)
    with errors_on_all(what, group, refusal):
        stored.refuse_other_class(values, class_of(optimizer))
        groups = stored.groups(values, names_in_groups(optimizer, names), all_names(everyone))
        schemas = schemas_of(optimizer, groups)
        new_tensors, items = {}, {}
        for name, tensor in tensors.items():
            if id(tensor) not in new_tensors:  # tied ones once, by the first of their names
                value = torch.empty(local(tensor).shape, dtype=tensor.dtype, device="cpu")
                new_tensors[id(tensor)] = local(tensor), value
                items[stored.key_of_tensor(name, tensor.dtype)] = whole(value, tensor)
    read(items)
    with errors_on_all(what, group, refusal):
        items, new_states = {}, {}  # key -> Boxes; index -> path -> value
        for index, piece in pieces.items():
            common = paths_of_common(schemas[index])
            new_states[index] = stored.room_for_state(names[index], piece, common, values, items)
    read(items)
    with errors_on_all(what, group, refusal):
        states = {index: stored.state(names[index], state, values) for index, state in new_states.items()}
        check_states(schemas, names, states, {index: piece.main.shape for index, piece in pieces.items()})
        ready = prepared(optimizer, states, groups)
    with errors_on_all(what, group):
        for tensor, value in new_tensors.values():
            tensor.copy_(value)
        install(optimizer, ready)
    return values.get(stored.key_of_extra)


class Stored:
    """What is in a checkpoint, of this program or of FSDP2 or torchtitan, which have other names for some of it.

    Attributes:
        metadata: what DCP knows of it; `keys` are those of all tensors and values in it.
        checksum: to know whether all ranks read the same.
        states: name of a parameter -> path of a value in its state -> key.
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
        self.states, paths = {}, self.metadata.planner_data or {}
        for key in [key for key in self.keys if key.startswith("optimizer.state.")]:
            path = paths.get(key, ())
            name, *path = path[2:] if path[:2] == STATE else key.removeprefix("optimizer.state.").rsplit(".", 1)
            self.states.setdefault(name, {})[path_of(path)] = key

    def is_tensor(self, key):
        return isinstance(self.keys[key], TensorStorageMetadata)

    def refuse_other_model(self, tensors, names_of_all):
        """Raise ForeignCheckpoint with the first difference between the model and what was saved."""
        saved_tensors = {key.removeprefix(self.prefix): self.keys[key]
                         for key in self.keys if key.startswith(self.prefix)
                  and self.is_tensor(key)}
        missing = [name for name in saved_tensors if name not in names_of_all] if self.prefix else []
        for name in [*tensors, *missing]:
            there, inside = (f"has it with shape {shape}" if shape is not None else "doesn't have it" for shape in (
                tuple(saved_tensors[name].size) if name in saved_tensors else None,
                tuple(tensors[name].shape) if name in tensors else None))
            if there != inside:
                raise ForeignCheckpoint(f"it is of another model: {name}: the checkpoint {there}, the model {inside}")
            saved_dtype, dtype = saved_tensors[name].properties.dtype, tensors[name].dtype
            if saved_dtype != dtype and not (saved_dtype.is_floating_point and dtype.is_floating_point):
                raise ForeignCheckpoint(f"it is of another model: {name} is {saved_dtype} there, {dtype} in the model")

    def refuse_other_class(self, values, ours):
        about = values.get(ABOUT)
        saved_optimizer = about["optimizer"] if about else ours
        if saved_optimizer != ours:
            raise ForeignCheckpoint(f"it is of {saved_optimizer}, this optimizer is {ours}")

    def keys_of_values(self, names):
        """Return the keys of everything that is no tensor, and that this rank needs to load parameters `names`."""
        for key in self.keys:
            if not self.is_tensor(key) and (key in (ABOUT, self.key_of_extra) or key.startswith(f"{path_of(GROUPS)}.")):
                yield key
        for name in names:
            yield from (key for key in self.states.get(name, {}).values() if not self.is_tensor(key))

    def groups(self, values, ours, ours_on_all) -> list[dict]:
        """Return the hyperparameters of each group. Raises ForeignCheckpoint: other parameters are in the groups.

        `ours`: names of the parameters in the groups of this optimizer; `ours_on_all`: of all ranks.
        """
        prefix = f"{path_of(GROUPS)}."
        options = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        saved_groups = [options[f"{number}.params"] for number in range(len(options)) if f"{number}.params" in options]
        if saved_groups:
            if [sorted(names) for names in saved_groups] != [sorted(names) for names in ours_on_all]:
                raise ForeignCheckpoint(f"its parameter groups are {summary(saved_groups)}, this optimizer's "
                                        f"{summary(ours)}")
            firsts = [[str(number)] for number in range(len(ours))]
        else:
            firsts = ours  # torchtitan has a group for each parameter
        groups = []
        for names in firsts:
            of_each = [{key.removeprefix(f"{name}."): value for key, value in options.items()
                        if key.startswith(f"{name}.")} for name in names] or [{}]
            if any(repr(group) != repr(of_each[0]) for group in of_each):
                raise ForeignCheckpoint(f"the parameters of one group, {summary([names])}, were in several groups")
            groups.append({key: value for key, value in of_each[0].items() if key not in ("params", "param_names")})
        return groups

    def key_of_tensor(self, name, dtype):
        """Return the key of a tensor of the model: of its main parameter, if that would be rounded twice otherwise."""
        key, main = f"{self.prefix}{name}", self.states.get(name, {}).get("main_param")
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
            lead = lead_of(size, piece.param.shape)
            if key == main_key:
                dtype = piece.main.dtype
            if lead is None or path in common:
                state[path] = torch.empty(size, dtype=dtype, device="cpu")
                items[key] = whole(state[path])
            else:
                state[path] = torch.empty((*lead, *piece.main.shape), dtype=dtype, device="cpu")
                items[key] = boxes(state[path].view(*lead, -1), piece.param, piece.start)
        return state

    def state(self, name, state, values):
        """Return a state with its dicts and lists, of its values by path."""
        trees = (values.get(ABOUT) or {"trees": {}})["trees"]
        tree = dict(trees.get(name) or dict.fromkeys(state))
        if "main_param" in state:
            tree["main_param"] = None
        elif name in trees:
            tree.pop("main_param", None)
        return filled(tree, state)


@contextlib.contextmanager
def quiet(group):
    """Leave out DCP's warning that a program without process groups has none."""
    with warnings.catch_warnings():
        if group is None:
            warnings.simplefilter("ignore", UserWarning)
        yield


def summary(groups):
    return " and ".join(f"{len(names)} from {names[0]} to {names[-1]}" if names else "an empty one" for names in groups)


def refusal(error):
    """Return the error as that of a checkpoint: what doesn't fit is foreign; what the disk can't read is damaged."""
    if isinstance(error, ValueError) and not isinstance(error, CheckpointError):
        return ForeignCheckpoint(str(error))
    return DamagedCheckpoint(error.strerror) if getattr(error, "errno", None) in DISK_ERRORS else error


def checked_files(folder, rank, world_size) -> dict[str, int]:
    """Return file -> its number of bytes, of all files of a checkpoint. This rank sums up its share of them.

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
        with damage_of(name), opened(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            need(size == n_bytes, f"{n_bytes} bytes were written, now it is {size} bytes")
            if number % world_size == rank:
                checksum = checksum_of_file(file)
                need(checksum == crc, f"its checksum was {crc:08x}, now it is {checksum:08x}")
    return {name: n_bytes for name, (n_bytes, _) in sums.items()}


def read_sums(folder):
    with damage_of(SUMS), opened(folder / SUMS) as file:
        sums = json.load(file)
        need(type(sums) is dict, "it is no dict")
        for name, (n_bytes, crc) in sums.items():
            need(name not in ("", ".", "..") and "/" not in name and "\0" not in name, f"file {name!r:.60}")
            need(is_count(n_bytes) and is_count(crc), f"the sum of {name!r:.60}")
        return sums


@contextlib.contextmanager
def damage_of(name):
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{name} is damaged: it is missing") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{name} is damaged: {first_line(error)}") from None


def opened(path):
    """Return the open file. Raises ValueError if it is a link, or no regular file, which one might wait for."""
    need(not path.is_symlink(), "it is a link")
    need(path.is_file() or not path.exists(), "it is no regular file")
    return open(path, "rb")


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
