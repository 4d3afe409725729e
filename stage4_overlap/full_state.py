"""An optimizer's state: a rank's part, or the whole, put together from its shards and cut again, maybe on other ranks.

The same file stands in stages 3 and 4. A parameter's index is its place in all groups, as in torch's own state_dict.
One parameter travels at a time: beyond its own part and what it asked for, no rank ever holds more than that.
"""

import copy
import numbers
import pickle
from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .checks import all_params, local, refuse_no_group, spread_over
from .inner import OptimizerWrapper


TAG = 2**30 - 1  # of messages to rank 0: not one that others might use


class Piece(NamedTuple):
    """What this rank steps of a parameter: flat elements `start` to `stop`, known to the inner optimizer as `main`."""

    start: int
    stop: int
    main: torch.Tensor


def inner_of(optimizer):
    return getattr(optimizer, "optimizer", optimizer)


def pieces_of(optimizer) -> dict[int, Piece]:
    """-> index -> Piece. Stages 1 and 2 own whole parameters; every rank owns all those of a plain torch optimizer."""
    index_of = {id(param): index for index, param in enumerate(all_params(optimizer))}
    if not hasattr(optimizer, "sharded_params"):
        return {index_of[id(p)]: Piece(0, p.numel(), p) for p in all_params(inner_of(optimizer)) if p.numel()}
    for shard in optimizer.sharded_params:
        shard.take_model_changes()
    return {
        index_of[id(shard.params[r.index])]: Piece(r.start, r.stop, main)
        for shard in optimizer.sharded_params
        for r, main in zip(shard.ranges, shard.main_params)
    }


def bounds_of(optimizer) -> dict[int, tuple[int, ...]]:
    """-> index -> (start, stop) of its Piece: what two state_dicts must have in common to be one for the other.

    And of a DTensor, this rank in the other dimensions of its mesh: there it has another part, which looks alike.
    """
    params = all_params(optimizer)
    return {index: (piece.start, piece.stop, *map(dist.get_rank, spread_over(params[index])))
            for index, piece in pieces_of(optimizer).items()}


def main_params_of(optimizer) -> dict[int, torch.Tensor]:
    """-> index -> this rank's piece of it in fp32, where the parameter has 16 bits."""
    params = all_params(optimizer)
    return {index: main for index, (_, _, main) in pieces_of(optimizer).items() if main.dtype != params[index].dtype}


def states_of(optimizer, pieces, all_main_params=False) -> dict[int, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """-> index -> name -> a tensor of the piece's shape; and name -> what all pieces of a parameter have in common.

    A "step" may have one element, and so may a piece: its shape is not enough, `expected_state` knows which it is.
    The main parameter of one that was never stepped is left out: torch would take it for a whole state. The model has
    its value, except what rounding lost if it was loaded in fp32. `all_main_params` keeps it.
    """
    params, states = all_params(optimizer), {}
    expected = expected_state(optimizer) if hasattr(optimizer, "sharded_params") else [{}] * len(params)
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
        options = copy.deepcopy({**saved_hyperparameters(group), **saved_hyperparameters(saved)})
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


def saved_hyperparameters(group):
    """fused=None: nobody has chosen, and what this optimizer has found out about its device stays."""
    left_out = {"params", "param_names"} | ({"fused"} if group.get("fused") is None else set())
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
        if getattr(optimizer, "chose_fused", False) and "fused" in group:
            groups[-1]["fused"] = None
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
        group.update(saved_hyperparameters(saved))
    if inner is not optimizer:
        optimizer._pass_on_hyperparameters()
    inner.load_state_dict({"state": inner_states, "param_groups": inner.state_dict()["param_groups"]})


def refuse_outsider(optimizer):
    if optimizer.rank < 0:
        raise RuntimeError("this rank is in no process group since reshard(): it has no part in the state")


def like(param, flat):
    """Flat elements in the shape of a parameter. What is of a DTensor becomes one, on the device of its mesh."""
    whole = flat.view(local(param).shape)
    if not hasattr(param, "device_mesh"):
        return whole
    layout = {"shape": param.shape, "stride": param.stride()}
    return type(param).from_local(whole, param.device_mesh, param.placements, run_check=False, **layout)


def gather(states, pieces, params, group, dst):
    """-> iterator over (index, whole tensors, what is common) of each parameter that has a state. Collective.

    On rank `dst` of `group`, None: on all. The tensors are flat, (numel,), on the device of the parameter; each travels
    when it is asked for.

    Raises:
        RuntimeError: a part of a state is on no rank; on every rank, before anything travels.
    """
    mine = {}  # index -> start, stop, name -> dtype of what has to travel, name -> what all pieces have in common
    for index, (cut, common) in states.items():
        start, stop, _ = pieces[index]
        dtypes = {key: part.dtype for key, part in cut.items()}
        mine[index] = start, stop, dtypes, {key: _on_cpu(value) for key, value in common.items()}
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for index, param in enumerate(params):
        found = [theirs[index] for theirs in everyone if index in theirs]
        common = {key for *_, their_common in found for key in their_common}
        for key in {key for _, _, dtypes, _ in found for key in dtypes} - common:
            if sum(stop - start for start, stop, dtypes, _ in found if key in dtypes) < local(param).numel():
                raise RuntimeError(f"the state of parameter {index} has {key} for some of its elements only: some "
                                   "ranks have stepped it and others not, or cleared it")
    return _put_together(everyone, states, params, group, dst)


def _put_together(everyone, states, params, group, dst):
    """`everyone`: for each rank, what `gather` has called `mine`."""
    rank = dist.get_rank(group)
    for index, param in enumerate(params):
        whole, common = {}, {}
        for owner, theirs in enumerate(everyone):
            start, stop, dtypes, their_common = theirs.get(index, (0, 0, {}, {}))
            common.update(their_common)
            for key, dtype in dtypes.items():
                if dst in (None, rank):
                    if key not in whole:
                        whole[key] = torch.empty(local(param).numel(), dtype=dtype, device=param.device)
                    part = whole[key][start:stop]
                    if owner == rank:
                        part.copy_(states[index][0][key])
                    if dst is None:
                        dist.broadcast(part, group=group, group_src=owner)
                    elif owner != rank:
                        dist.recv(part, group=group, group_src=owner, tag=TAG)
                elif owner == rank:
                    dist.send(states[index][0][key], group=group, group_dst=dst, tag=TAG)
        if (whole or common) and dst in (None, rank):
            yield index, whole, common


def _on_cpu(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _plan(optimizer, state_dict):
    """-> groups, index -> (name -> dtype of what has to travel, name -> value). ValueError: it can't be loaded."""
    if not (isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()):
        raise ValueError("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != ours:
        raise ValueError(f"this state_dict has groups of {sizes} parameters, this optimizer has {ours}")
    unknown = state_dict["state"].keys() - range(sum(ours))
    if unknown:
        raise ValueError(f"this state_dict has a state of {min(unknown, key=str)!r}: parameters must be indices")
    names = [f"parameter {index}" for index in range(sum(ours))]
    states = {names[index]: state for index, state in state_dict["state"].items()}
    all_expected, described = expected_of_saved(optimizer, names, states, state_dict["param_groups"]), {}
    for index, (param, expected) in enumerate(zip(all_params(optimizer), all_expected)):
        state = state_dict["state"].get(index, {})
        elementwise = state.keys() & {"main_param", *(key for key in expected if expected[key])}
        common = {key: _on_cpu(value) for key, value in state.items() if key not in elementwise}
        described[index] = {key: state[key].dtype for key in elementwise}, common
        for key in elementwise:
            if state[key].shape != param.shape:
                shapes = f"{tuple(state[key].shape)} in this state_dict, the parameter is {tuple(param.shape)}"
                raise ValueError(f"{key} of parameter {index} is {shapes}")
            if local(state[key]).shape != local(param).shape:
                kinds = f"{type(state[key]).__name__} in this state_dict, the parameter is a {type(param).__name__}"
                raise ValueError(f"{key} of parameter {index} is a {kinds}, with another part on this rank")
    return state_dict["param_groups"], described


class StateOfPieces(MutableMapping):
    """The inner optimizer's state by parameter of the model, though what is stepped are pieces of them.

    Args:
        states: parameter of the inner optimizer -> name -> a tensor of the piece's shape, or a scalar.
        main_param: parameter of the model -> this rank's piece of it, if there is one.
    """

    def __init__(self, states, main_param):
        self.states, self.main_param = states, main_param

    def _key(self, param):
        return self.main_param.get(param, param)

    def __getitem__(self, param):
        return self.states[self._key(param)]

    def __setitem__(self, param, state):
        self.states[self._key(param)] = state

    def __delitem__(self, param):
        del self.states[self._key(param)]

    def __contains__(self, param):
        return self._key(param) in self.states

    def __iter__(self):
        param_of = {main: param for param, main in self.main_param.items()}
        return (param_of.get(key, key) for key in self.states)

    def __len__(self):
        return len(self.states)

    # What MutableMapping makes of the methods above would not notice what isn't there: torch's `states` makes it.

    def get(self, param, default=None):
        return self.states.get(self._key(param), default)

    def pop(self, param, *default):
        return self.states.pop(self._key(param), *default)

    def setdefault(self, param, default=None):
        return self.states.setdefault(self._key(param), default)


class ShardedOptimizer(OptimizerWrapper):
    """What stages 3 and 4 save and load, without a file. None of it is the idea of a stage.

    Attributes, which the stage sets, beside those of OptimizerWrapper:
        rank: of this process in `process_group`; -1: in none.
        sharded_params: objects with `params`, `ranges`, `main_params` and `take_model_changes()`, as buffers have them.
        main_param: parameter of the model -> this rank's piece of it, if there is one: what the inner optimizer steps.
        chose_fused: whether a stage has chosen the fused kernel, and not the user: `packed_groups` says None then.
    """

    @property
    def state(self):
        """By parameter what this rank steps of it: flat pieces, and nothing of one that lies on other ranks.

        A dict that is assigned is copied.
        """
        return StateOfPieces(self.optimizer.state, self.main_param)

    @state.setter
    def state(self, state):
        main_param = self.__dict__.get("main_param", {})  # there is none yet where torch's constructor sets it
        self.optimizer.state = defaultdict(dict, {main_param.get(key, key): value for key, value in state.items()})

    def state_dict(self):
        """This rank's part of the state, without communication: to be loaded on the same rank of as many.

        Raises:
            ValueError: somebody has put into `state` what is of no tensor that this rank steps.
        """
        return {
            **self._inner_state_dict(),
            "main_params": main_params_of(self),
            "bounds": bounds_of(self),
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def load_state_dict(self, state_dict):
        """Take over what `state_dict` returned on this rank, without communication.

        Raises:
            ValueError: it was made by another rank, on another number of ranks, or with other shards.
        """
        made_by, here = (state_dict.get("rank"), state_dict.get("world_size")), (self.rank, self.world_size)
        if made_by != here:
            raise ValueError(f"this state_dict is of (rank, world size) {made_by}, this is {here}")
        main_params = main_params_of(self)
        saved = state_dict.get("bounds"), state_dict.get("main_params", {}).keys()
        if (bounds_of(self), main_params.keys()) != saved:
            raise ValueError(
                "this state_dict is of other shards, by another bucket_cap_mb, grad_dtype or tensor-parallel rank say: "
                "use full_state_dict()"
            )
        self.optimizer.load_state_dict(state_dict)
        for index, main_param in main_params.items():
            main_param.copy_(state_dict["main_params"][index])
        self._take_back_hyperparameters()

    @torch.no_grad()
    def full_state_dict(self, to_all=False):
        """The state_dict() of the plain torch optimizer, on rank 0, or on all ranks; on the CPU. Collective.

        Returns {} on the other ranks. Where parameters have 16 bits, the state is in fp32, and that of one that was
        stepped, and not cleared since, has a "main_param". With TORCH_DISTRIBUTED_DEBUG=DETAIL torch takes sends for
        collectives, which three ranks and more must have alike: pass to_all=True then.

        Raises:
            RuntimeError: some ranks have a state for their part of a parameter, and others don't; on every rank.
        """
        if to_all:
            refuse_outsider(self)
        dst, pieces, params = None if to_all else 0, pieces_of(self), all_params(self)
        state = {}
        for index, whole, common in gather(states_of(self, pieces), pieces, params, self.process_group, dst):
            state[index] = {key: like(params[index], value.cpu()) for key, value in whole.items()} | common
        return {"state": state, "param_groups": packed_groups(self)} if dst in (None, self.rank) else {}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict):
        """Take over the `state_dict` of rank 0: a plain torch optimizer's, or `full_state_dict`'s. Collective.

        Load the model before: 16-bit parameters are what main parameters begin with where there is no "main_param".

        Raises:
            ValueError: on every rank, before anything is changed; it is of another model or optimizer.
        """
        refuse_outsider(self)
        group, pieces, params = self.process_group, pieces_of(self), all_params(self)
        plan = [None]
        if self.rank == 0:
            try:
                plan[0] = _plan(self, state_dict)
                pickle.dumps(plan)  # before the others wait for it
            except ValueError as error:
                plan[0] = error
            except Exception as error:  # the other ranks wait for the plan
                plan[0] = ValueError(f"this state_dict can't be read: {error!r}")
        dist.broadcast_object_list(plan, group=group, group_src=0)
        if isinstance(plan[0], ValueError):
            raise plan[0]
        groups, described = copy.deepcopy(plan[0])  # on rank 0 it is the caller's own, which a step would change
        inner_of(self).state.clear()
        states = {}
        for index, (dtypes, common) in described.items():
            states[index] = common
            for key, dtype in dtypes.items():
                param = local(params[index])
                whole = torch.empty(param.numel(), dtype=dtype, device=param.device)
                if self.rank == 0:
                    whole.copy_(local(state_dict["state"][index][key]).reshape(-1))
                dist.broadcast(whole, group=group, group_src=0)
                if key == "main_param":
                    param.copy_(whole.view(param.shape))
                if index in pieces:
                    states[index][key] = whole[pieces[index].start : pieces[index].stop].clone()
        install(self, states, groups)


@torch.no_grad()
def reshard(optimizer, process_group, has_grads):
    """See DistributedOptimizer.reshard. `has_grads`: whether this rank is between backward() and step()."""
    error, to = None, []
    try:
        refuse_no_group(process_group)
        if dist.get_rank(process_group) >= 0:
            to = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    except (TypeError, ValueError) as refusal:  # it is something else, or was destroyed
        error = refusal
    params, pieces = all_params(optimizer), pieces_of(optimizer)
    states = states_of(optimizer, pieces, all_main_params=True)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (packed_groups(optimizer), has_grads, optimizer.rank, to, error))
    all_groups, all_have_grads, ranks, all_to, errors = zip(*everyone)
    if any(errors):
        raise error or next(filter(None, errors))
    if any(all_have_grads):
        raise RuntimeError("reshard() between backward() and step(): call step() or zero_grad() first")
    if len({tuple(len(group["params"]) for group in groups) for groups in all_groups}) > 1:
        raise RuntimeError("the ranks have different parameter groups: some of them have called add_param_group()")
    if ranks.count(0) > 1:
        raise RuntimeError("reshard() of several process groups: each may have trained something else, as experts do")
    members = [rank for rank, theirs in enumerate(all_to) if theirs]
    if not members or any(sorted(all_to[rank]) != members for rank in members):
        raise RuntimeError("reshard() to a process group must be called with it, and no other, on each of its ranks")
    wholes = gather(states, pieces, params, None, dst=None)
    source = ranks.index(0)
    for param in params:
        if optimizer.rank < 0:
            param.grad = None  # a gradient of a rank outside counts nowhere, and would be part of the next step here
        dist.broadcast(param, src=source)  # to the ranks that join
    del pieces  # and the memory that the parameters leave
    optimizer.move_to(process_group)
    new_pieces, moved = pieces_of(optimizer), {}
    for index, whole, common in wholes:
        if index in new_pieces:
            start, stop, _ = new_pieces[index]
            moved[index] = {key: value[start:stop].clone() for key, value in whole.items()} | common
    install(optimizer, moved, all_groups[source])
