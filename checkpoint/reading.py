"""Reads checkpoints: each rank reads what it needs, all of it before anything changes.

No file is unpickled: the manifest is JSON, and tensors are bytes.
"""

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Any

import torch

from guard.schema import Spec, described

from .boxes import box_of, whole_box
from .errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint
from .full_state import filled
from .json_values import unpack, unpack_data
from .manifest import MANIFEST, manifest_of, most_bytes
from .optimizers import (
    all_params,
    check_hyperparameters,
    inner_of,
    install,
    itself,
    local,
    names_of,
    packed_groups,
    pieces_of,
    prepared,
    ranks_of,
    state_of,
    untied,
    unwrapped,
)
from .rank_files import Reader
from .ranks import all_gather, errors_on_all, rank_in
from .states import check_kept, check_states, fixed_paths, kind_of

DISK_ERRORS = errno.EIO, errno.EUCLEAN, errno.EBADMSG  # of a disk that can't read what it has


@torch.no_grad()
def load(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Read a checkpoint into `model` and `optimizer`, each rank what it needs. Collective. -> `extra` as it was saved.

    On another number of ranks than it was saved on, `extra` is that of rank 0. Its tensors are on the CPU. Nothing is
    unpickled, and no code from a file is ever run. Everything is read before anything is changed: for that moment each
    rank has the model a second time, on the CPU.

    Raises:
        DamagedCheckpoint: it is damaged, or not complete, or the disk can't read it.
        ForeignCheckpoint: it is of another model or optimizer.
        UnfitModel: as `save`.
        CheckpointError: anything else. Each on every rank, before anything is changed.
    """
    optimizer = itself(optimizer)
    group, what = ranks_of(optimizer), f"checkpoint {path} can't be loaded"
    rank, world_size = rank_in(group)
    with errors_on_all(what, group), read_errors_are_damage():
        path, model = Path(path), unwrapped(model)
        names, pieces = names_of(model, optimizer), pieces_of(optimizer)
        manifest, checksum_of_text = manifest_of(path, most_bytes(len(state_of(model))))
        groups = [filled(group["options"], None) for group in manifest.groups]  # data, as has been checked
        schemas = check(manifest, model, optimizer, names, groups)
    if len(set(all_gather(checksum_of_text, group))) > 1:
        raise CheckpointError(f"{what}: the ranks read different checkpoints")
    with errors_on_all(what, group), read_errors_are_damage():
        reader = Reader(path, manifest, rank, world_size)
        found = {name: room_for(reader, manifest, name, tensor) for name, tensor in untied(model).items()}
        states = {index: state_of_piece(reader, manifest, names[index], all_params(optimizer)[index], piece,
                                        fixed_paths(schemas[index])) for index, piece in pieces.items()}
        extra = unpack(manifest.extra[rank if manifest.ranks == world_size else 0], tensors_of(reader, manifest))
        reader.run()
        for index, state in states.items():  # of the pieces themselves: whatever a kernel reads has been seen
            check_piece(schemas[index], state, pieces[index].main, names[index])
        ready = prepared(optimizer, states, groups)
    with errors_on_all(what, group):
        for name, tensor in untied(model).items():
            local(tensor).copy_(found.pop(name))
        install(optimizer, ready)
    return extra


def check_piece(schema, state, main, name):
    """Check a state that was read against the tensor `main`, with which a kernel will use it."""
    own = described(state)
    main_param = own.pop("main_param", Spec(main.shape, main.dtype))
    if main_param.shape != main.shape:
        raise ForeignCheckpoint(f"main_param in the state of {name} is {main_param}, this rank's part is {main.shape}")
    check_kept(schema, own, main.shape, name)


@contextlib.contextmanager
def read_errors_are_damage():
    try:
        yield
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise DamagedCheckpoint(error.strerror) from None
        raise


def check(manifest, model, optimizer, names, saved_groups):
    """Raise ForeignCheckpoint with the first difference, if it is of another model or optimizer. -> the schemas."""
    here = type(inner_of(optimizer)).__name__
    if manifest.optimizer != here:
        raise ForeignCheckpoint(f"it is of {manifest.optimizer}, this optimizer is {here}")
    ours, theirs = state_of(model), {name: manifest.tensors[f"model.{name}"] for name in manifest.model}
    for name in [*ours, *theirs]:
        there, inside = (f"has it with shape {tuple(one[name].shape)}" if name in one else "doesn't have it"
                         for one in (theirs, ours))
        if there != inside:
            raise ForeignCheckpoint(f"it is of another model: {name}: the checkpoint {there}, the model {inside}")
        there, inside = theirs[name].dtype, ours[name].dtype
        if kind_of(there) != kind_of(inside):
            raise ForeignCheckpoint(f"it is of another model: {name} is {there} there, {inside} in the model")
    groups = [[names[index] for index in group["params"]] for group in packed_groups(optimizer)]
    theirs = [group["params"] for group in manifest.groups]
    if theirs != groups:
        raise ForeignCheckpoint(f"its parameter groups are {summary(theirs)}, this optimizer's {summary(groups)}")
    specs = {key: Spec(tuple(stored.shape), stored.dtype) for key, stored in manifest.tensors.items()}
    try:
        check_hyperparameters(optimizer, saved_groups)
        states = {name: described(filled(state, specs.get)) for name, state in manifest.states.items()}
        return check_states(optimizer, names, states, saved_groups)
    except ValueError as refusal:
        raise ForeignCheckpoint(str(refusal)) from None


def summary(groups):
    return " and ".join(f"{len(names)} from {names[0]} to {names[-1]}" if names else "an empty one" for names in groups)


def tensors_of(reader, manifest, piece=None, box=None):
    """-> a function for `unpack`: -> an uninitialized tensor, which `reader` fills; for a piece its part, in its shape.

    `box`: the part of the parameter that this rank has.
    """
    def tensor(name, what):
        if name == "data":
            return unpack_data(what)
        stored = manifest.tensors[what]
        if name == "tensor" or piece is None:
            return reader.box(stored, whole_box(stored.shape[stored.n_lead :]))
        part = reader.part(stored, box, piece.start, piece.stop).view((*stored.lead, *piece.main.shape))
        if stored.lead or piece.main.is_contiguous():
            return part
        found = torch.empty_like(piece.main, dtype=part.dtype, device="cpu")  # as the piece lies: kernels don't look
        reader.copies.append((found, part))
        return found
    return tensor


def room_for(reader, manifest, name, tensor):
    """-> memory for what becomes `tensor`, or its local part, of the model.

    If the dtype has changed, the main parameter is read instead, so that it is rounded only once.
    """
    stored = manifest.tensors[f"model.{name}"]
    main = pieces_in(manifest, name).get("main_param")  # in fp32, if the parameter had 16 bits when it was saved
    stored = manifest.tensors[main] if main and tensor.dtype != stored.dtype else stored
    return reader.box(stored, box_of(tensor))


def pieces_in(manifest, name) -> dict[str, str]:
    """-> name -> key in the files, for each entry of a parameter's state that is stored as pieces."""
    return {key: value["piece"] for key, value in manifest.states.get(name, {"dict": []})["dict"]
            if isinstance(key, str) and isinstance(value, dict) and "piece" in value}


def state_of_piece(reader, manifest, name, param, piece, fixed):
    """-> the state of `piece`, not yet filled. `fixed`: entries that don't follow the parameter's shape."""
    tensors = tensors_of(reader, manifest, piece, box_of(param))
    state = unpack(manifest.states.get(name, {"dict": []}), tensors)
    for key, piece_key in pieces_in(manifest, name).items():
        if key in fixed:
            state[key] = tensors("tensor", piece_key)
    if piece.main.dtype != param.dtype and "main_param" not in state:
        state["main_param"] = tensors("piece", f"model.{name}")
    return state


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """-> the complete checkpoint in `folder` with the highest number at the end of its name; None if there is none.

    Names without such a number, such as best, don't count, nor do checkpoints that were set aside.
    """
    complete = [path.parent for path in Path(folder).glob(f"*/{MANIFEST}") if path.is_file()
                and re.search(r"\d$", path.parent.name) and not re.search(r"\.aside-\d+$", path.parent.name)]
    return max(complete, key=lambda path: (int(re.search(r"\d+$", path.name)[0]), path.name), default=None)
