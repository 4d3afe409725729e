"""Refuses parameters that can't work, by name, on every rank, before anything is changed.

Examples are duplicates, several devices, different models on the ranks, and groups edited behind the optimizer's back.
Shown by tests/stages/test_contract.py, `test_refuses_before_anything_changes`.
"""

import functools
import hashlib
import os
import warnings
from itertools import zip_longest

import torch
import torch.distributed as dist

from .groups import named_params, settings_of

NEWEST = "2.14.1"  # the newest torch on which all tests passed
PLAIN = bool, int, float, str, type, torch.dtype, type(None)  # equal values of these print the same on every rank


def checked_groups(params, process_group, existing=(), *, refuse, settings=None):
    """-> `params` as a list of parameter groups, or the same refusal on every rank. Collective.

    Args:
        params: what torch.optim.Optimizer takes: tensors, (name, tensor) pairs, or dicts with a "params" entry.
        existing: the groups that the optimizer has already.
        refuse: function of [(name, parameter), …] that raises TypeError or ValueError for what the stage can't take.
            -> [(name, tensor), …]: the part of each parameter that is on this rank.
        settings: the stage's arguments by name, which must be the same on every rank.

    Raises:
        RuntimeError: there is no process group, or this rank is not in it.
        TypeError: something is not a tensor, parameters are in a set, or `process_group` is something else.
        ValueError: there are no parameters; or one can't be sharded or updated, because it is a duplicate, shares
            memory with another, is sparse, integer or 8-bit, is no leaf, was made in inference_mode(), has gaps in
            memory, or is on another device or one that `process_group` has no backend for. Or only some parameters have
            names, or the ranks disagree.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group() first")
    no_groups = None, dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(process_group, dist.ProcessGroup) and process_group not in no_groups:
        kind = type(process_group).__name__
        raise TypeError(f'process_group must be a ProcessGroup, such as mesh["dp"].get_group(), not a {kind}')
    if dist.get_rank(process_group) < 0:
        raise RuntimeError(f"rank {dist.get_rank()} is not in process_group: build the optimizer on its ranks only")
    groups, lines, error = [], [], None
    backends = backends_of(process_group)
    device = "cpu" if "cpu" in backends else next(iter(backends))
    try:
        groups = _as_groups(params)
        if len({"param_names" in group for group in [*existing, *groups]}) > 1:
            raise ValueError("some parameter groups have names for their parameters: name all of them or none")
        named = named_params([*existing, *groups])
        if not named:  # as in torch, one group may be empty, but not all
            raise ValueError("the parameter list is empty: pass model.parameters()")
        _check_params(named, backends)
        if named[0][1].device.type == device:
            device = named[0][1].device  # the GPU with the model, if there are several
        here = refuse(named)
        _check_memory(here)
        lines = [f"{key}={value}" for key, value in (settings or {}).items() if _is_plain(value)]
        lines += [f"{name} {tuple(tensor.shape)} {tensor.dtype}{'' if param.requires_grad else ' frozen'}"
                  for (name, tensor), (_, param) in zip(here, named)]
        lines += [f"{what}={value}" for (what, _), value in settings_of([*existing, *groups]).items()]
    except (RuntimeError, TypeError, ValueError) as refusal:
        error = refusal
    agree(error, lines, process_group, device)
    return groups


def backends_of(process_group):
    """-> device type -> backend, such as "cpu" -> "gloo". A group made without a backend's name has several."""
    config = dist.distributed_c10d.BackendConfig(dist.Backend(dist.get_backend_config(process_group)))
    return config.get_device_backend_map()


def param_ids(groups):
    return [[id(param) for param in group["params"]] for group in groups]


def refuse_edited(groups, known):
    """Raise RuntimeError if parameters changed since they were sharded. `known`: param_ids() at that time."""
    if param_ids(groups) != known:
        raise RuntimeError("the parameters in param_groups have changed: add them with add_param_group(), or build "
                           "the optimizer anew")


def _as_groups(params):
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of tensors or dicts, such as model.parameters(), not one tensor")
    _refuse_set(params)
    try:
        items = list(params)
    except TypeError:
        raise TypeError(f"params must be an iterable of tensors or dicts, not {type(params).__name__}") from None
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    for g, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f"parameter group {g} must be a dict with a 'params' entry")
        _refuse_set(group["params"])
        items = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        groups[g] = {**group, "params": items}
        if any(isinstance(item, tuple) for item in items):
            if not all(isinstance(item, tuple) for item in items):
                raise ValueError(f"parameter group {g} names some of its parameters: name all of them or none")
            groups[g].update(params=[param for _, param in items], param_names=[name for name, _ in items])
    return groups


def _refuse_set(params):
    if isinstance(params, (set, frozenset)):
        raise TypeError("params must come in the same order on every rank, and a set has no order: pass a list")


def _check_params(named, backends):
    first_name, first = named[0]
    name_of = {}
    for name, param in named:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"parameter {name} is not a tensor but {type(param).__name__}")
        if id(param) in name_of:
            raise ValueError(f"parameter {name} is a duplicate of parameter {name_of[id(param)]}: pass each one once")
        name_of[id(param)] = name
        if param.layout != torch.strided:
            raise ValueError(f"parameter {name} is sparse ({param.layout}): only dense parameters can be sharded")
        if param.is_inference():
            raise ValueError(f"parameter {name} was made in inference_mode(), for good: make the model outside of it")
        if not param.is_leaf:
            raise ValueError(f"parameter {name} is not a leaf: only leaf tensors receive gradients")
        if not param.is_floating_point() or param.dtype.itemsize < 2:
            raise ValueError(f"parameter {name} has dtype {param.dtype}: only floats of 16 bits or more can be stepped")
        if param.device != first.device:
            raise ValueError(f"parameter {name} is on {param.device}, {first_name} on {first.device}: use one device")
        if param.device.type not in backends:
            only = ", ".join(f"{backend} for {device}" for device, backend in backends.items())
            raise ValueError(f"parameter {name} is on {param.device}, process_group has {only}: move the model before")


def _check_memory(named):
    """Refuse parameters that share memory: they would be averaged and updated as two, but written back as one."""
    for name, tensor in named:
        if tensor.stride() != torch.empty_like(tensor, device="meta").stride():
            raise not_contiguous(name, tensor)
    # data_ptr() is 0 for empty tensors and on the meta device
    spans = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in named if tensor.data_ptr())
    for (start, nbytes, name), (other_start, _, other) in zip(spans, spans[1:]):
        if other_start < start + nbytes:
            raise ValueError(f"parameters {name} and {other} share memory: tie them as one torch.nn.Parameter")


def refuse_dtensors(named):
    for name, param in named:
        if hasattr(param, "device_mesh"):
            raise ValueError(f"parameter {name} is a DTensor: use stage 4, which shards what each rank has of it")


def refuse_other_layouts(named):
    for name, tensor in named:
        if not tensor.is_contiguous():
            raise not_contiguous(name, tensor)


def data_replaced(name):
    return RuntimeError(f"the data of parameter {name} was replaced, by model.to(), share_memory(), "
                        "vector_to_parameters() or another optimizer, and this one steps the old: write into it with "
                        "copy_(), or build the optimizer afterwards")


def not_contiguous(name, tensor):
    return ValueError(f"parameter {name} is not contiguous (strides {tensor.stride()}): use the default layout")


def _is_plain(value):
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, PLAIN)


def agree(error, lines, process_group, device):
    """Raise on every rank if one of them has an `error`, or if the ranks have different `lines`. Collective."""
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    report = torch.tensor([error is not None, digest, -digest], device=device)  # all digests are equal if max is min
    dist.all_reduce(report, dist.ReduceOp.MAX, group=process_group)
    failed, largest, minus_smallest = report.tolist()
    if not failed and largest == -minus_smallest:
        return
    reports = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(reports, (error, lines), group=process_group)
    for rank, (theirs, _) in enumerate(reports):
        if theirs is not None:
            raise error or type(theirs)(f"rank {rank}: {theirs}")
    first = reports[0][1]
    rank, other = next((rank, lines) for rank, (_, lines) in enumerate(reports) if lines != first)
    ours, theirs = next((a, b) for a, b in zip_longest(first, other, fillvalue="nothing") if a != b)
    raise ValueError(f"the ranks disagree on parameters or arguments: rank 0 has {ours}, rank {rank} {theirs}")


@functools.cache
def warn_of_an_untried_torch(version=str(torch.__version__)):
    """Warn once per process, under torchrun on rank 0 only. Patch releases of NEWEST count as tried."""
    minor, tried = (tuple(map(int, release.split(".")[:2])) for release in (version, NEWEST))
    if minor > tried and os.environ.get("RANK", "0") == "0":
        warnings.warn(f"torch {version} is newer than {NEWEST}, the newest that DistributedOptimizer was tried with",
                      stacklevel=2)


def silence_torch():
    """Silence two warnings of torch, when an optimizer is built and not at import.

    One asks for new names of two collectives, which releases before 2.13 lack. The other is about GradScaler passing
    itself to `step`, the only way to report an inf on another rank to it.
    """
    for message in (".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated",
                    "GradScaler is going to stop passing itself"):
        warnings.filterwarnings("ignore", message, FutureWarning)
