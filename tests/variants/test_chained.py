"""Two optimizers as one: a clip over both equals torch's over the whole model; so do accumulation and a state_dict."""

import pytest
import torch
import torch.distributed as dist

from guard.chained import Chained, method_of_each
from harness import STAGE_4
from tests.common import Net, error_of, on_ranks, optimizer_of
from tests.pairs import ADAMW, SGD, UNFUSED, Pair, backward, sgd_of
from tests.stages.test_contract import two_groups


class PlainChain:
    """torch's own SGD for matrices, and AdamW for the rest."""

    def __init__(self, groups, **adamw):
        matrices, rest = groups
        self.optimizers = [torch.optim.SGD([matrices], **SGD, **UNFUSED), torch.optim.AdamW([rest], **adamw)]

    step = method_of_each("step")
    zero_grad = method_of_each("zero_grad")


def chain_of(stage):
    """Return a function that makes a Chained of the same classes in `stage`, with the arguments of PlainChain."""
    def make(groups, _=None, **adamw):
        matrices, rest = groups
        optimizer_class = optimizer_of(stage)
        return Chained(optimizer_class([matrices], torch.optim.SGD, **SGD, **UNFUSED),
                       optimizer_class([rest], torch.optim.AdamW, **adamw))
    return make


@on_ranks(norm_type=[2.0, torch.inf])
def test_two_optimizers_are_clipped_together(rank, stage, norm_type):
    """Take steps of two micro-batches, the first in no_sync(), and load the state into a new pair before the last."""
    pair = Pair(rank, stage, PlainChain, two_groups, of=chain_of)
    for step in range(3):
        if step == 2:
            state_dict = pair.optimizer.state_dict()
            pair.optimizer = chain_of(stage)(two_groups(pair.model), **ADAMW)
            pair.optimizer.load_state_dict(state_dict)
        with pair.optimizer.no_sync():
            pair.backward(2 * step)
        pair.backward(2 * step + 1)
        assert pair.clip(0.05, norm_type) > 0.05
        pair.step()
    pair.assert_same(is_exact=False)


class Counting(torch.optim.AdamW):
    """Keeps a state that belongs to no parameter."""

    def step(self, closure=None):
        self.state["shared"] = {"calls": self.state["shared"].get("calls", 0) + 1}
        return super().step(closure)


@on_ranks()
def test_a_state_of_no_parameter_is_saved_and_loaded(rank, stage):
    """Take a step with a Chained, load the state into another Chained, and take a second step with that one."""
    model = Net(0)
    state_dict = {}
    for n_steps in (1, 2):
        matrices, rest = two_groups(model)
        chain = Chained(optimizer_of(stage)([matrices], torch.optim.SGD, **SGD, **UNFUSED),
                        optimizer_of(stage)([rest], Counting, **ADAMW))
        if n_steps == 2:
            chain.load_state_dict(state_dict)
        backward(model, rank, n_steps)
        chain.step()
        state_dict = chain.state_dict()
        assert state_dict["state"]["shared"] == {"calls": n_steps}


@on_ranks(3)
def test_groups_of_which_none_is_part_of_the_other_are_refused(rank):
    optimizers = []
    for ranks in ([0, 1], [0, 2], [1, 2]):
        group = dist.new_group(ranks)
        if rank.number in ranks:
            optimizers.append(optimizer_of(STAGE_4)([torch.nn.Parameter(torch.ones(3))], process_group=group))
    assert "alike can't be known" in error_of(lambda: Chained(*optimizers), ValueError)


@on_ranks(4)
def test_a_mesh_of_all_ranks_and_experts_on_some_are_clipped_together(rank):
    """No process group has the other's ranks: the groups of hybrid are [0, 1] and [2, 3]. Each loss is a rank's number.

    The mean gradient of `dense` is 1.5; those of the two experts are 0.5 and 1. Each has four elements.
    """
    expert_group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    number_of_expert = rank.number % 2
    dense = torch.nn.Parameter(torch.ones(4))
    expert = torch.nn.Parameter(torch.ones(4))
    of_dense = sgd_of("tests.variants.on_pairs", [dense])
    of_expert = sgd_of(STAGE_4, [expert], process_group=expert_group, average_over=dist.group.WORLD)
    chain = Chained(of_dense, of_expert)

    def closure():
        (dense.sum() * rank.number + expert.sum() * (1 + number_of_expert)).backward()
        return float(rank.number)

    closure()
    norm = (4 * (1.5**2 + 0.5**2 + 1.0**2)) ** 0.5
    assert chain.clip_grad_norm_(norm / 2).item() == pytest.approx(norm)
    chain.step()
    for param, mean in ((dense, 1.5), (expert, (1 + number_of_expert) / 2)):
        torch.testing.assert_close(param.detach(), torch.full_like(param, 1 - mean / 2))
    assert chain.step(closure) == 1.5


@on_ranks(2)
def test_all_gradients_have_come_before_any_parameters_leave(rank):
    """`step` of the second optimizer asks all ranks. It must not wait for parameters of the first optimizer."""
    model = Net(seed=0)
    chain = chain_of(STAGE_4)(two_groups(model), **ADAMW)
    order = []

    def noted(name, method):
        """Return `method`, which first appends `name` to `order`."""
        def note_and_call(*args):
            order.append(name)
            method(*args)
        return note_and_call

    for optimizer in chain.optimizers:
        for bucket in optimizer.buckets:
            bucket.gradient.add = noted("come", bucket.gradient.add)
            bucket.start_param_sync = noted("leave", bucket.start_param_sync)
    backward(model, rank, 0)
    chain.step()
    assert set(order) == {"come", "leave"} and order == sorted(order)
