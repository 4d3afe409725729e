"""Refuses parameters and arguments that a stage can't work with: raises an error on every rank before anything changes.

A *stage* is one of the four versions of the distributed optimizer. An *inner optimizer*, such as torch's AdamW, updates
a rank's part of the parameters: whole parameters in stages 1 and 2, pieces of parameters in stages 3 and 4.

Examples: parameters share memory, or are on several devices, or the ranks have different models. Shown by
tests/stages/test_contract.py, `test_refuses_before_anything_changes`.
"""

import math
import numbers
import warnings

import torch
import torch.distributed as dist

from .groups import checksum_of, first_difference, named_params, settings_of


class ParamsReader(torch.optim.Optimizer):
    """Reads `params` and fills in hyperparameters as torch does. It never steps.

    It has a class of its own, because torch changes the `step` of a class when the first object of the class is made.
    """


def checked_groups(optimizer, params, settings):
    """Return `params` as parameter groups with all hyperparameters, or raise an error on every rank. Collective.

    It also sets `optimizer._leaves_grads`: whether the inner optimizer leaves gradients as they are.

    Args:
        optimizer: a distributed optimizer under construction, or one that gets a further group.
        params: what torch.optim.Optimizer takes: tensors, (name, tensor) pairs, or dicts with a "params" entry.
        settings: the stage's own arguments by name, which must be the same on every rank.

    Raises:
        RuntimeError: this rank is not in the process group.
        TypeError: `process_group` is no group, or `optimizer_cls` no class.
        TypeError, ValueError, KeyError: torch can't read `params`, or `optimizer_cls` refuses its arguments.
        ValueError:
            - there are no parameters;
            - a parameter shares memory with another parameter, is sparse, integer or 8-bit, has gaps in memory, or is
              on another device;
            - the ranks disagree;
            - the stage's method `_refuse` refuses a parameter, or its `_probe` refuses `optimizer_cls`.
    """
    process_group = optimizer._agreement_group
    # dist.new_group() returns an int on ranks outside of the group. The check of get_rank() refuses it.
    if not isinstance(process_group, (dist.ProcessGroup, int, type(None))):
        kind = type(process_group).__name__
        raise TypeError(f'process_group must be a ProcessGroup, such as mesh["dp"].get_group(), not a {kind}')
    if dist.get_rank(process_group) < 0:
        raise RuntimeError(f"rank {dist.get_rank()} is not in process_group: build the optimizer on its ranks only")
    groups = []
    error = None
    device = next(iter(backends_of(process_group)))  # a type of device, such as "cpu", whose tensors the group can send
    try:
        if isinstance(params, (set, frozenset)):  # torch refuses a set only as "params" of a group
            raise TypeError("params must come in the same order on every rank, and a set has no order: pass a list")
        defaults = optimizer.make_optimizer([{"params": []}]).defaults  # lr and so on
        groups = ParamsReader(params, defaults).param_groups
        named = named_params(groups)
        if not named:  # as in torch, a group may be empty, but not all groups
            raise ValueError("the parameter list is empty: pass model.parameters()")
        _, first_param = named[0]
        if first_param.device.type == device:
            device = first_param.device  # the GPU with the model, if there are several
        check_params(named, optimizer._takes_dtensors)
        stored = optimizer._refuse(named)  # the stage's own checks. [(name, tensor that the stage stores), …]
        check_memory(stored, optimizer._takes_channels_last)
        settings = {name: str(value) for name, value in settings.items()}  # the ranks compare these texts
        settings["average_over"] = divisor_of(optimizer.average_over, dist.get_world_size(process_group))
        settings["optimizer_cls"] = optimizer.make_optimizer.func.__name__
        for (name, tensor), (_, param) in zip(stored, named):
            frozen = "" if param.requires_grad else " frozen"
            # The key only has to be new, because the text names the parameter, and an error shows the text.
            settings[f"parameter {len(settings)}"] = f"{name} {tuple(tensor.shape)} {tensor.dtype}{frozen}"
        settings.update(settings_of(groups))
    except Exception as refusal:
        error = refusal  # not raised yet, so that all ranks meet in agree(), which raises it on every rank
    agree(error, settings, process_group, device)
    # `_probe` raises an error if the stage can't run this optimizer class.
    optimizer._leaves_grads = optimizer._probe(optimizer.make_optimizer, groups)
    return groups


def callable_or_refusal(optimizer_cls):
    """Return `optimizer_cls`, or if it is no class, a function that raises TypeError.

    `checked_groups` calls the result. There an error on one rank becomes an error on all ranks.
    """
    def refuse(*_, **__):
        raise TypeError("optimizer_cls must be a class, such as torch.optim.AdamW, not an object of class "
                        f"{type(optimizer_cls).__name__}")

    return optimizer_cls if callable(optimizer_cls) else refuse


def backends_of(process_group):
    """Return {device type: backend} of a group, such as {"cpu": "gloo"}.

    A group has several backends if the program names none.
    """
    # torch turns the group's text, such as "cpu:gloo,cuda:nccl", into this dict.
    config = dist.distributed_c10d.BackendConfig(dist.Backend(dist.get_backend_config(process_group)))
    return config.get_device_backend_map()


def check_params(named, takes_dtensors):
    """Raise ValueError if no stage can shard or update one of `named`, which is [(name, parameter), …].

    takes_dtensors: whether the stage takes DTensors.
    """
    first_name, first = named[0]
    for name, param in named:
        if param.layout != torch.strided:
            raise ValueError(f"parameter {name} is sparse ({param.layout}): only dense parameters can be sharded")
        if not param.is_floating_point() or param.dtype.itemsize < 2:
            raise ValueError(f"parameter {name} has dtype {param.dtype}: only floats of 16 bits or more can be stepped")
        if param.is_meta:
            raise ValueError(f"parameter {name} is on the meta device, without memory: call model.to_empty() first")
        if param.device != first.device:
            raise ValueError(f"parameter {name} is on {param.device}, {first_name} on {first.device}: use one device")
        if hasattr(param, "device_mesh") and not takes_dtensors:
            raise ValueError(f"parameter {name} is a DTensor: use stage 4, which shards what each rank has of it")


def check_memory(named, takes_channels_last):
    """Raise ValueError if a tensor of `named`, [(name, tensor), …], has gaps in memory or shares memory with another.

    If tensors share memory, the update of each tensor would overwrite the update of the other.

    takes_channels_last: whether the stage takes torch's layout "channels last", which NCCL can send, too.
    """
    # Number of dimensions -> that layout.
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d} if takes_channels_last else {}
    for name, tensor in named:
        other_layout = channels_last.get(tensor.dim(), torch.contiguous_format)
        if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=other_layout):
            raise ValueError(f"parameter {name} is not contiguous (strides {tensor.stride()}): use the default layout, "
                             "by contiguous() or model.to(memory_format=torch.contiguous_format)")
    # Sorted by address, so that only neighbours can overlap. data_ptr() is 0 for empty tensors and on the meta device.
    spans = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in named if tensor.data_ptr())
    for (start, n_bytes, name), (next_start, _, next_name) in zip(spans, spans[1:]):
        if next_start < start + n_bytes:
            raise ValueError(f"parameters {name} and {next_name} share memory: pass each one once, and tie as one "
                             "torch.nn.Parameter")


def divisor_of(average_over, n_ranks):
    """Return the number by which sums of gradients are divided.

    average_over: this number, or a process group whose size is this number. None: the number is `n_ranks`.
    """
    if average_over is None:
        return n_ranks
    number = float(average_over.size()) if isinstance(average_over, dist.ProcessGroup) else average_over
    if isinstance(number, bool) or not isinstance(number, numbers.Real) or not 0 < number < math.inf:
        raise ValueError(f"average_over is {number}: it must be a process group of this rank, or a number above 0")
    return number


def data_replaced(name):
    """Return the error for the parameter `name`, whose values no longer lie in the memory that the optimizer updates.
    """
    return RuntimeError(f"the data of parameter {name} was replaced, by model.to(), Trainer (see "
                        "docs/frameworks.md), share_memory(), vector_to_parameters() or another optimizer, and this "
                        "one steps the old: write into it with copy_(), or build the optimizer afterwards")


def agree(error, settings, process_group, device):
    """Raise on every rank if a rank has an `error`, or if the ranks have different `settings`. Collective.

    error: the exception of this rank, or None. A rank with an exception raises it. Any other rank raises an error with
        the text of the first exception.
    settings: name -> number or text.
    device: a device whose tensors the group can send.
    """
    checksum = checksum_of(settings)
    report = torch.tensor([error is not None, checksum, -checksum], device=device)
    # The all-reduce takes the maximum of each number: whether any rank failed, and the largest checksum. The maximum of
    # -checksum is minus the smallest checksum.
    dist.all_reduce(report, dist.ReduceOp.MAX, group=process_group)
    failed, largest, minus_smallest = report.tolist()
    if failed:
        # Other ranks raise one of Python's own classes. A library's class may be missing there, or its constructor may
        # take other arguments.
        kind = next((kind for kind in (TypeError, ValueError, KeyError) if isinstance(error, kind)), RuntimeError)
        own_report = None if error is None else (kind, str(error))  # what this rank tells the others
        reports = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(reports, own_report, group=process_group)
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        for rank, report_of_rank in zip(ranks, reports):
            if report_of_rank:
                kind, text = report_of_rank
                raise error or kind(f"rank {rank}: {text}")  # each rank raises at the first report
    # If checksums differ only by the rounding of floats, first_difference() returns None.
    if largest != -minus_smallest and (difference := first_difference(settings, process_group)):
        raise ValueError(f"the ranks disagree on parameters or arguments: {difference}")


def silence_torch():
    """Silence two warnings of torch. Constructors call this, because an import should change no warning filter.

    One warning asks programs to call two collectives by new names, which torch before 2.13 doesn't have. The other
    warning says that a later GradScaler won't pass itself to `step`. Our `step` needs the scaler, to tell it about an
    inf on another rank.
    """
    for message in (".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated",
                    "GradScaler is going to stop passing itself"):
        warnings.filterwarnings("ignore", message, FutureWarning)
