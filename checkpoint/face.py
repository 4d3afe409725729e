"""What is asked of an optimizer: of a stage's by the face that `checkpoint` describes, of a plain one by torch's own.

A parameter's index is its place in all groups, as in torch's own state_dict.
"""

import copy
import numbers
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Hyperparameters that say how this process computes, and nothing about the model: they are saved, and not loaded.
HOW_IT_COMPUTES = {"fused", "foreach", "capturable", "differentiable"}


class Piece(NamedTuple):
    """What this rank steps of a parameter: flat elements `start` to `stop`, known to the inner optimizer as `main`."""

    start: int
    stop: int
    main: torch.Tensor


def all_params(optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def local(tensor):
    """Of a DTensor, as a tensor-parallel model has them, what lies on this rank; of any other tensor, itself."""
    return getattr(tensor, "_local_tensor", tensor)


def inner_of(optimizer):
    return getattr(optimizer, "optimizer", optimizer)


def group_of(optimizer):
    """The process group whose ranks share the work; None: all ranks, each of which has a plain optimizer's state."""
    return getattr(optimizer, "process_group", None)


def pieces_of(optimizer) -> dict[int, Piece]:
    """-> index -> Piece, without those of no element. Every rank has all parameters of a plain torch optimizer."""
    index_of = {id(param): index for index, param in enumerate(all_params(optimizer))}
    plain = [(param, 0, param.numel(), param) for param in all_params(optimizer)]
    pieces = optimizer.pieces() if hasattr(optimizer, "pieces") else plain
    return {index_of[id(param)]: Piece(start, stop, main) for param, start, stop, main in pieces if start < stop}


def steps_ranges(optimizer) -> bool:
    """Whether a rank may step a range of a parameter, as in stages 3 and 4, and not only whole ones."""
    return hasattr(optimizer, "move_to")


def states_of(optimizer, pieces, all_main_params=False) -> dict[int, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """-> index -> name -> a tensor of the piece's shape; and name -> what all pieces of a parameter have in common.

    A "step" may have one element, and so may a piece: its shape is not enough, `expected_state` knows which it is.
    The main parameter of one that was never stepped is left out: torch would take it for a whole state. The model has
    its value, except what rounding lost if it was loaded in fp32. `all_main_params` keeps it.
    """
    params, states = all_params(optimizer), {}
    expected = expected_state(optimizer) if steps_ranges(optimizer) else [{}] * len(params)
    for index, piece in pieces.items():
        state = inner_of(optimizer).state.get(piece.main, {})
        cut = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)
               and value.shape == piece.main.shape and expected[index].get(key, True)}
        states[index] = cut, {key: value for key, value in state.items() if key not in cut}
        has_main_param = piece.main.dtype != params[index].dtype
        if has_main_param and (all_main_params or state or not expected[index]):  # SGD may never have a state
            cut["main_param"] = piece.main
    return states


def expected_state(optimizer, saved_groups=None) -> list[dict[str, bool]]:
    """What the state of each parameter consists of: name -> whether it has an element for each of the parameter's.

    Found out with a parameter of two elements, for each group: its hyperparameters may matter, or those saved of it.
    """
    expected = []
    for group, saved in zip(optimizer.param_groups, saved_groups or optimizer.param_groups):
        probe = torch.zeros(2, device=group["params"][0].device)
        probe.grad = torch.zeros_like(probe)
        options = copy.deepcopy({**hyperparameters(group), **hyperparameters(saved)})
        inner = optimizer.make_optimizer([{**options, "params": [probe]}])
        inner.step()
        elementwise = {key: getattr(value, "shape", ()) == probe.shape for key, value in inner.state[probe].items()}
        expected += [elementwise] * len(group["params"])
    return expected


def expected_of_saved(optimizer, names, states, saved_groups) -> list[dict[str, bool]]:
    """As expected_state, but what fits `states`, by name: it may be that of `saved_groups` or that of ours.

    They differ where momentum was set to 0 since, say. Raises ValueError where a state is neither; a parameter that was
    never stepped has none.
    """
    expected = []
    for name, *kinds in zip(names, expected_state(optimizer, saved_groups), expected_state(optimizer)):
        found = states.get(name, {}).keys() - {"main_param"}
        fitting = [kind for kind in kinds if not found or kind.keys() == found]
        if not fitting:
            keeps = ", ".join(kinds[0]) or "nothing"
            raise ValueError(f"the state of {name} is of another optimizer: {', '.join(states[name])}, "
                             f"this one keeps {keeps}")
        expected.append(fitting[0])
    return expected


def hyperparameters(group) -> dict:
    """What a group has to say about the model's training, and takes over from a group that was saved."""
    left_out = {"params", "param_names"} | HOW_IT_COMPUTES
    return {key: value for key, value in group.items() if key not in left_out}


def packed_groups(optimizer) -> list[dict]:
    """The groups as a plain torch optimizer's state_dict has them: with the indices of their parameters.

    And with Python's numbers for NumPy's, which a schedule may put there and torch.load(weights_only=True) refuses.
    """
    groups, n_before = [], 0
    for group in optimizer.param_groups:
        groups.append({key: value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value
                       for key, value in group.items()})
        groups[-1]["params"] = list(range(n_before, n_before + len(group["params"])))
        n_before += len(group["params"])
    return groups


@torch.no_grad()
def install(optimizer, states, groups):
    """Replace the inner optimizer's state by `states`, index -> name -> tensor or value, and all hyperparameters."""
    inner, params = inner_of(optimizer), all_params(optimizer)
    place_of = {id(main): place for place, main in enumerate(all_params(inner))}
    inner_states = {}
    for index, piece in pieces_of(optimizer).items():
        state = dict(states.get(index, {}))
        main_param = state.pop("main_param", None)
        if piece.main.dtype != params[index].dtype:
            own = local(params[index]).reshape(-1)[piece.start : piece.stop]
            piece.main.copy_(own if main_param is None else main_param)
        if state:
            inner_states[place_of[id(piece.main)]] = state
    for group, saved in zip(optimizer.param_groups, groups):
        group.update(hyperparameters(saved))
    if inner is not optimizer:
        optimizer.pass_on_hyperparameters()
    inner.load_state_dict({"state": inner_states, "param_groups": inner.state_dict()["param_groups"]})


def refuse_outsider(optimizer):
    if getattr(optimizer, "rank", 0) < 0:
        raise RuntimeError("this rank is in no process group since reshard(): it has no part in the state")


def refuse_no_group(process_group):
    others = None, dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(process_group, dist.ProcessGroup) and process_group not in others:
        kind = type(process_group).__name__
        raise TypeError(f'process_group must be a ProcessGroup, such as mesh["dp"].get_group(), not a {kind}')
