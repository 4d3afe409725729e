"""An optimizer's state as one dict, put together from its pieces and cut again, maybe on other ranks.

One parameter travels at a time: beyond its own part and what it asked for, no rank ever holds more than that.
"""

import copy
import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .face import all_params, expected_of_saved, group_of, inner_of, install, local, packed_groups, pieces_of
from .face import refuse_outsider, states_of, steps_ranges
from .ranks import all_gather, rank_and_size

TAG = 2**30 - 1  # of messages to rank 0: not one that others might use


@torch.no_grad()
def full_state_dict(optimizer, to_all=False) -> dict:
    """The state_dict() of the plain torch optimizer, on rank 0, or on all ranks; on the CPU. Collective.

    Returns {} on the other ranks. Where parameters have 16 bits, the state is in fp32, and that of one that was
    stepped, and not cleared since, has a "main_param". With TORCH_DISTRIBUTED_DEBUG=DETAIL torch takes sends for
    collectives, which three ranks and more must have alike: pass to_all=True then.

    Args:
        optimizer: a DistributedOptimizer of any stage, or a torch optimizer.

    Raises:
        RuntimeError: some ranks have a state for their part of a parameter, and others don't; on every rank.
    """
    if to_all:
        refuse_outsider(optimizer)
    group, dst = group_of(optimizer), None if to_all else 0
    rank, _ = rank_and_size(group)
    if rank < 0:
        return {}
    pieces, params, state = pieces_of(optimizer), all_params(optimizer), {}
    for index, whole, common in gather(states_of(optimizer, pieces), pieces, params, group, dst):
        state[index] = {key: like(params[index], value.cpu()) for key, value in whole.items()} | common
    return {"state": state, "param_groups": packed_groups(optimizer)} if dst in (None, rank) else {}


@torch.no_grad()
def load_full_state_dict(optimizer, state_dict):
    """Take over the `state_dict` of rank 0: a plain torch optimizer's, or `full_state_dict`'s. Collective.

    Load the model before: 16-bit parameters are what main parameters begin with where there is no "main_param".

    Raises:
        ValueError: on every rank, before anything is changed; it is of another model or optimizer.
    """
    refuse_outsider(optimizer)
    groups, described = broadcast_plan(optimizer, state_dict)
    pieces, params, states = pieces_of(optimizer), all_params(optimizer), {}
    rank, _ = rank_and_size(group_of(optimizer))
    inner_of(optimizer).state.clear()
    for index, (dtypes, common) in described.items():
        states[index] = common
        for key, dtype in dtypes.items():
            param = local(params[index])
            whole = torch.empty(param.numel(), dtype=dtype, device=param.device)
            if rank == 0:
                whole.copy_(local(state_dict["state"][index][key]).reshape(-1))
            if dist.is_initialized():
                dist.broadcast(whole, group=group_of(optimizer), group_src=0)
            if key == "main_param":
                param.copy_(whole.view(param.shape))
            if index in pieces:
                start, stop, main = pieces[index]
                states[index][key] = torch.empty_like(main, dtype=dtype).copy_(whole[start:stop].view(main.shape))
    install(optimizer, states, groups)


def like(param, flat):
    """Flat elements in the shape of a parameter. What is of a DTensor becomes one, on the device of its mesh."""
    whole = flat.view(local(param).shape)
    if not hasattr(param, "device_mesh"):
        return whole
    layout = {"shape": param.shape, "stride": param.stride()}
    return type(param).from_local(whole, param.device_mesh, param.placements, run_check=False, **layout)


class Part(NamedTuple):
    """What one rank has of the state of a parameter."""

    start: int
    stop: int
    dtypes: dict[str, torch.dtype]  # of what has to travel
    common: dict[str, Any]  # what all pieces of the parameter have in common


def gather(states, pieces, params, group, dst):
    """-> iterator over (index, whole tensors, what is common) of each parameter that has a state. Collective.

    On rank `dst` of `group`, None: on all. The tensors are flat, (numel,), on the device of the parameter; each travels
    when it is asked for.

    Raises:
        RuntimeError: a part of a state is on no rank; on every rank, before anything travels.
    """
    mine = {}  # index -> Part
    for index, (cut, common) in states.items():
        dtypes = {key: part.dtype for key, part in cut.items()}
        mine[index] = Part(*pieces[index][:2], dtypes, {key: on_cpu(value) for key, value in common.items()})
    everyone = all_gather(mine, group)
    for theirs, others in zip(everyone, [everyone[:rank] for rank in range(len(everyone))]):
        for index, part in list(theirs.items()):  # what several ranks have whole, as with a plain optimizer, comes once
            if any(index in other and other[index][:2] == part[:2] for other in others):
                del theirs[index]
    for index, param in enumerate(params):
        found = [theirs[index] for theirs in everyone if index in theirs]
        common = {key for part in found for key in part.common}
        for key in {key for part in found for key in part.dtypes} - common:
            if sum(part.stop - part.start for part in found if key in part.dtypes) < local(param).numel():
                raise RuntimeError(f"the state of parameter {index} has {key} for some of its elements only: some "
                                   "ranks have stepped it and others not, or cleared it")
    return put_together(everyone, states, params, group, dst)


def put_together(everyone, states, params, group, dst):
    """`everyone`: of each rank, index -> Part. See `gather`."""
    rank, _ = rank_and_size(group)
    for index, param in enumerate(params):
        whole, common = {}, {}
        for owner, theirs in enumerate(everyone):
            part = theirs.get(index, Part(0, 0, {}, {}))
            common.update(part.common)
            for key, dtype in part.dtypes.items():
                mine = flat(states[index][0][key]) if owner == rank else None
                if dst in (None, rank):
                    if key not in whole:
                        whole[key] = torch.empty(local(param).numel(), dtype=dtype, device=param.device)
                    bring(whole[key][part.start : part.stop], mine, owner, group, dst)
                elif owner == rank:
                    dist.send(mine, group=group, group_dst=dst, tag=TAG)
        if (whole or common) and dst in (None, rank):
            yield index, whole, common


def flat(tensor):
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def bring(place, mine, owner, group, dst):
    """Fill `place` with what `owner` has: `mine`, if that is this rank. The other side of `send`, or a broadcast."""
    if mine is not None:
        place.copy_(mine)
    if dst is None and dist.is_initialized():
        dist.broadcast(place, group=group, group_src=owner)
    elif mine is None:
        dist.recv(place, group=group, group_src=owner, tag=TAG)


def on_cpu(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def broadcast_plan(optimizer, state_dict):
    """-> groups, index -> (name -> dtype of what has to travel, name -> value), from rank 0. ValueError on all."""
    group, plan = group_of(optimizer), [None]
    if rank_and_size(group)[0] == 0:
        try:
            plan[0] = plan_of(optimizer, state_dict)
            pickle.dumps(plan)  # before the others wait for it
        except ValueError as error:
            plan[0] = error
        except Exception as error:  # the other ranks wait for the plan
            plan[0] = ValueError(f"this state_dict can't be read: {error!r}")
    if dist.is_initialized():
        dist.broadcast_object_list(plan, group=group, group_src=0)
    if isinstance(plan[0], ValueError):
        raise plan[0]
    return copy.deepcopy(plan[0])  # on rank 0 it is the caller's own, which a step would change


def plan_of(optimizer, state_dict):
    check_indices(optimizer, state_dict)
    described = {}
    for index, (param, expected) in enumerate(zip(all_params(optimizer), expected_of(optimizer, state_dict))):
        state = state_dict["state"].get(index, {})
        elementwise = state.keys() & {"main_param", *(key for key in expected if expected[key])}
        common = {key: on_cpu(value) for key, value in state.items() if key not in elementwise}
        described[index] = {key: state[key].dtype for key in elementwise}, common
        for key in elementwise:
            check_like(param, state[key], f"{key} of parameter {index}")
    return state_dict["param_groups"], described


def check_indices(optimizer, state_dict):
    if not (isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()):
        raise ValueError("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != ours:
        raise ValueError(f"this state_dict has groups of {sizes} parameters, this optimizer has {ours}")
    unknown = state_dict["state"].keys() - range(sum(ours))
    if unknown:
        raise ValueError(f"this state_dict has a state of {min(unknown, key=str)!r}: parameters must be indices")


def expected_of(optimizer, state_dict) -> list[dict[str, bool]]:
    """Of each parameter: name -> whether that part of its state has an element for each of the parameter's."""
    params = all_params(optimizer)
    if not steps_ranges(optimizer):
        return [{key: getattr(value, "shape", None) == param.shape for key, value in state.items()}
                for param, state in ((param, state_dict["state"].get(i, {})) for i, param in enumerate(params))]
    names = [f"parameter {index}" for index in range(len(params))]
    states = {names[index]: state for index, state in state_dict["state"].items()}
    return expected_of_saved(optimizer, names, states, state_dict["param_groups"])


def check_like(param, value, name):
    if value.shape != param.shape:
        raise ValueError(f"{name} is {tuple(value.shape)} in this state_dict, the parameter is {tuple(param.shape)}")
    if local(value).shape != local(param).shape:
        kinds = f"{type(value).__name__} in this state_dict, the parameter is a {type(param).__name__}"
        raise ValueError(f"{name} is a {kinds}, with another part on this rank")
