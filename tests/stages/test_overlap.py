"""Stage 4: overlap that is right whatever the schedule, and that overlaps. And bugs of real systems."""

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections import OrderedDict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from harness.measuring.ledger import Ledger
from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import Awaited
from stage4_overlap.drops import UNDER_WAY
from stage4_overlap.transport import Transport
from tests.common import STAGES, batch, loss_of, on_its_device, on_ranks, one_rank_of, situation
from tests.pairs import SGD, SMALL, Pair, WhenAsked, assert_same, deliver_when_asked, parameter_of, sgd_of
from tests.ranks import ROOT

ADAMW = {"lr": 0.01, "weight_decay": 0.1, "fused": True}
FOUR = STAGES[3]


class Branches(torch.nn.Module):
    """Six layers, called in any order: their gradients come in the reverse order, and no two of them are equal."""

    def __init__(self, seed, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7, dtype=dtype) for _ in range(6))

    def forward(self, x, order=range(6)):
        outputs = {i: torch.tanh(self.layers[i](x.to(self.layers[0].weight.dtype))) for i in order}
        return torch.stack([outputs[i] for i in sorted(order)]).sum(dim=0).float()


def params_of(model):
    return [param.detach().clone() for param in model.parameters()]


def equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def branches(rank, dtype=torch.float32, prefetch=True, **own):
    net = functools.partial(Branches, dtype=dtype)
    return Pair(rank, FOUR, net=net, own={**SMALL, **own}, rounds={"sum_dtype": torch.float32}, prefetch=prefetch,
                **ADAMW)


@on_ranks(dtype=[torch.float32, torch.bfloat16, torch.float16], bucket_cap_mb=[1e-6, 0.0002, None])
def test_results_do_not_depend_on_the_size_of_the_buckets(rank, dtype, bucket_cap_mb):
    """16 bits on the wire, fp32 sums: parameters are to the bit those of one process."""
    reduce_dtype = None if rank.backend == "gloo" else torch.float32
    pair = branches(rank, dtype, bucket_cap_mb=bucket_cap_mb, reduce_dtype=reduce_dtype)
    pair.train(0, 1, 2, 3)
    assert_same(*pair.models, exact=True)


@on_ranks(2, bucket_cap_mb=[1e-6, None])
def test_a_native_reduce_scatter_gives_what_an_exchange_gives(rank, bucket_cap_mb):
    """gloo's own collectives stand for those of NCCL; its average is a sum of what is divided.

    An average lands in the shard; that of a second micro-batch in this rank's part of what is sent, and is added.
    """
    gloos, landed = dist.reduce_scatter_tensor, []

    def averaged(output, full, op, **options):
        assert op == dist.ReduceOp.AVG
        landed.append((output.data_ptr(), full.data_ptr() + rank.rank * output.nbytes))
        return gloos(output, full.div_(rank.world_size), **options)

    native = mock.patch.object(DistributedOptimizer, "transport_for", lambda _, group, *__: Transport(group))
    with native, mock.patch.object(dist, "reduce_scatter_tensor", averaged), Ledger() as ledger:
        pair = branches(rank, bucket_cap_mb=bucket_cap_mb)
        pair.train(0, 1, 2, 3)
        assert_same(*pair.models, exact=True)
        pair.backward(4, 5)
        pair.step()
        pair.optimizer.finish_param_sync()
    pair.assert_same(is_exact=False)
    shards = [bucket.gradient.shard.data_ptr() for bucket in pair.optimizer.buckets]
    assert [place for place, _ in landed] == shards * 5 + [own_part for _, own_part in landed[-len(shards):]]
    assert ledger.collectives["all_gather"] == 5 * len(shards)


# ----------------------------------------------------------------------------------------------------------- prefetch


def deliver_what_was_sent(optimizer):
    """As `deliver_when_asked`; and whatever is written meanwhile is not sent, as on a network."""
    transport = optimizer.buckets[0].transport  # of all buckets
    all_gather = transport.all_gather

    def late(shards):
        sent = shards[transport.rank].clone()
        return [WhenAsked(lambda: (shards[transport.rank].copy_(sent), all_gather(shards))[1])]

    transport.all_gather = late


def starts(rank, model, x=None, deliver=deliver_when_asked):
    """-> the optimizer of `model`, after a step whose parameters arrive when somebody waits for them; and the input."""
    optimizer = DistributedOptimizer(model.parameters(), **SMALL, **ADAMW)
    optimizer.prefetch_params(model)
    deliver(optimizer)
    x = batch(0, rank.rank, device=rank.device)[0] if x is None else x
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(bucket.param_sync is not None for bucket in optimizer.buckets)
    return optimizer, x


@on_ranks
def test_a_module_waits_for_its_own_buckets_and_for_no_others(rank):
    """When a layer is called all before it have arrived, and what comes after it is still under way."""
    model, under_way = Branches(seed=0).to(rank.device), []
    _, x = starts(rank, model)
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda *_: under_way.append([isinstance(other.weight, Awaited) for other in model.layers]))
    first = model(x)
    assert under_way == [[other > own for other in range(6)] for own in range(6)]
    assert torch.equal(first, model(x))


def words():
    torch.manual_seed(0)
    return torch.nn.Sequential(OrderedDict(embed=torch.nn.Embedding(5, 7), head=torch.nn.Linear(7, 5)))


READS = {  # past `model(…)`, or before it is called
    "functional": lambda model: [torch.nn.functional.linear(torch.ones(7), model.head.weight)],
    "foreach": lambda model: torch._foreach_add(list(model.parameters()), 1.0),
    "data": lambda model: [param.data.clone() for param in model.parameters()],
    "data_ptr": lambda model: [model.head.weight.data_ptr() * 0 + model.head.weight.data],
    "numpy": lambda model: [torch.tensor(model.head.bias.detach().cpu().numpy())],
    "deepcopy": lambda model: params_of(copy.deepcopy(model)),
    "deepcopy of one": lambda model: [copy.deepcopy(model.head.weight)],
    "pickle": lambda model: params_of(pickle.loads(pickle.dumps(model))),
    "state_dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "repr": lambda model: [torch.tensor([ord(letter) for letter in repr(model.head.bias)])],
}


@on_ranks(2)
@on_its_device
def test_whoever_reads_past_the_hooks_sees_finished_parameters(rank):
    model = words()
    optimizer, _ = starts(rank, model, torch.arange(5))
    for with_grad in (True, False):
        for how, read in READS.items():
            with situation((how, with_grad)):
                model(torch.arange(5)).square().mean().backward()
                optimizer.step()
                with torch.set_grad_enabled(with_grad):
                    model.zero_grad()
                    assert [param.shape for param in model.parameters()] == [(5, 7), (5, 7), (5,)]
                    assert not hasattr(model.head.weight, "to_local")  # many take what has it for a DTensor
                    assert all(bucket.param_sync for bucket in optimizer.buckets)  # all that needed no waiting
                    first = read(model)
                    optimizer.finish_param_sync()
                    then = read(model)
                assert equal(first, then) and not any(isinstance(one, Awaited) for one in first)
                assert [type(param) for param in model.parameters()] == [torch.nn.Parameter] * 3


@on_ranks(2)
def test_what_is_written_while_it_is_under_way_stays(rank):
    """In place, or by load_state_dict(): nothing arrives on top of it."""
    model, other = (Branches(seed).to(rank.device) for seed in (0, 5))
    for write in (lambda: [param.copy_(its) for param, its in zip(model.parameters(), other.parameters())],
                  lambda: model.load_state_dict(other.state_dict())):
        optimizer, _ = starts(rank, model, deliver=deliver_what_was_sent)
        with torch.no_grad():
            write()
        optimizer.finish_param_sync()
        assert equal(params_of(model), params_of(other))


def test_each_module_gets_one_hook_which_can_be_removed():
    with one_rank_of(2):
        model = words()
        optimizer = DistributedOptimizer(model.parameters())
        handles = optimizer.prefetch_params(model)
        assert len(handles) == 3 and optimizer.prefetch_params(model) == []
    for handle in handles:
        handle.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())


class Odd(torch.nn.Module):
    """Reads parameters of modules that it doesn't call: containers, by vmap past torch's functions, and out_proj."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.gain = torch.nn.Parameter(torch.ones(7))
        self.experts = torch.nn.ParameterDict({"all": torch.randn(3, 7, 7)})
        self.more = torch.nn.ModuleList([torch.nn.ParameterList([torch.randn(7)])])
        self.attention = torch.nn.MultiheadAttention(7, 1, batch_first=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(4))

    def block(self, x):
        for i in (2, 0, 3, 2):  # out of order, one twice
            x = x + torch.tanh(self.layers[i](x))
        return x

    def forward(self, x):
        x = x @ torch.vmap(torch.tanh)(self.experts["all"]).mean(dim=0)
        x = x + torch.vmap(torch.sin)(self.more[0][0])
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        reentrant = {"reentrant": True, "non-reentrant": False}.get(self.how)
        x = self.block(x) if reentrant is None else checkpoint(self.block, x, use_reentrant=reentrant)
        return self.layers[1](x) * self.gain


@on_ranks(2, how=["plain", "reentrant", "non-reentrant", "compiled"])
def test_prefetch_out_of_order_twice_past_the_hooks_checkpointed_or_compiled(rank, how):
    """Take four steps, and evaluate in between. No new graphs, though torch.compile guards on classes."""
    graphs, seen = [], []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    pair = Pair(rank, FOUR, net=lambda seed: Odd(how), own=SMALL, prefetch=True, **ADAMW)
    (model, reference), optimizer = pair.models, pair.optimizer
    deliver_when_asked(optimizer)
    reference.how = "plain"  # torch.autograd.grad can't go through reentrant checkpointing
    forward = torch.compile(model, backend=backend) if how == "compiled" else model
    for step in range(4):
        x, y = batch(step, rank.rank, device=rank.device)
        loss_of(forward, x.requires_grad_(), y).backward()
        pair.replicated.backward(step)
        pair.step()
        seen.append(len(graphs))
        assert any(bucket.param_sync is not None for bucket in optimizer.buckets)
        if step == 1 and how != "compiled":
            with torch.no_grad():
                assert torch.equal(*(one.eval()(x) for one in pair.models))
            model.train()
    assert seen[-1] == seen[2] and bool(graphs) == (how == "compiled"), seen
    # Reentrant: the two gradients of the layer that is called twice are added one by one.
    pair.assert_same(how != "reentrant")


@on_ranks(2)
def test_modules_wait_for_all_that_a_function_of_torch_func_reads(rank):
    """What modules have while torch.func calls them are other tensors."""
    pair = Pair(rank, FOUR, torch.optim.SGD, own=SMALL, prefetch=True, **SGD)
    deliver_when_asked(pair.optimizer)
    model = pair.model
    for step in range(3):
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        x, y = batch(step, rank.rank, device=rank.device)

        def loss(params):
            return loss_of(lambda x: torch.func.functional_call(model, params, (x,)), x, y)

        for name, grad in torch.func.grad(loss)(params).items():
            params[name].grad = grad
        pair.replicated.backward(step)
        pair.step()
    pair.assert_same(is_exact=False)


@on_ranks(2)
def test_a_compiled_function_may_go_backward_and_step(rank):
    pair = branches(rank)

    @torch.compile(backend="eager")
    def train(x, y):
        loss_of(pair.model, x, y).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()

    for step in range(3):
        train(*batch(step, rank.rank, device=rank.device))
        pair.replicated.step(step)
    pair.assert_same()


@on_ranks(2, whole=[True, False])
def test_an_encoder_is_evaluated_after_a_step_as_at_any_time(rank, whole):
    """In eval torch's encoder asks the parameters of its first layer, which it doesn't call, for their class."""
    padding = torch.tensor([[False, False, True]], device=rank.device)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 2).to(rank.device)
    optimizer, x = starts(rank, model, torch.linspace(0, 1, 24, device=rank.device).view(1, 3, 8))
    (model if whole else model.layers).eval()
    with torch.no_grad():
        first, second = (model(x, src_key_padding_mask=padding) for _ in range(2))
    assert torch.equal(first, second)
    model.train()
    model(x).square().mean().backward()
    optimizer.step()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append(optimizer.buckets[0].param_sync is not None))
    model(x)
    assert seen == [True]  # in training each layer waits for its own


# ------------------------------------------------------------------------------------- messages and hooks of the user's


@on_ranks(2)
def test_gradients_keep_out_of_other_messages(rank):
    """The user's, with many tags, torch's default too, and of the size of a piece of gradients: half of them are sent
    before the backward pass and received after it, half the other way round.

    Rank 0 has an optimizer in a group of its own, too: what both ranks share has the same tags nevertheless.
    """
    alone = dist.new_group([0])
    if rank.rank == 0:
        DistributedOptimizer(Branches(seed=1).to(rank.device).parameters(), process_group=alone, **ADAMW)
    pair = branches(rank, prefetch=False)
    numel = pair.optimizer.buckets[0].shards.shape[1]
    seven = torch.full((numel,), 7.0, device=rank.device)
    for step in range(3):
        theirs = {tag: torch.zeros_like(seven) for tag in [0, *range(990, 1400)]}

        def send_or_receive(tags, theirs=theirs):
            return [dist.isend(seven, 0, tag=tag) if rank.rank else dist.irecv(theirs[tag], 1, tag=tag) for tag in tags]

        works = send_or_receive([*theirs][rank.rank :: 2])
        pair.backward(step)
        works += send_or_receive([*theirs][1 - rank.rank :: 2])
        pair.step()
        for work in works:
            work.wait()
        assert rank.rank or all(tensor.eq(7).all() for tensor in theirs.values())
        # Without prefetch a step waits for parameters. Works that are done stay: were gloo's thread the last to hold
        # one, it would need the GIL, and abort where Python ends: 6 runs of 30 did.
        assert all(bucket.param_sync is None and bucket.last_param_sync for bucket in pair.optimizer.buckets)
    pair.assert_same()


@on_ranks(2, bucket_cap_mb=[1e-6, 1])
def test_a_gradient_leaves_after_all_hooks_of_its_parameter_also_if_it_comes_twice(rank, bucket_cap_mb):
    """Hooks of the user's, later than the optimizer's: one sees the gradient, one changes what is averaged.

    In re-entrant checkpoints, each a backward pass of its own, that of `weight` comes twice, and no other in between.
    """
    weight, bias = parameter_of(0.5, rank), parameter_of(0.5, rank)
    optimizer = sgd_of(FOUR, [bias, weight], bucket_cap_mb=bucket_cap_mb)
    seen, x = [], torch.ones(5, device=rank.device, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", bias.grad / 2))

    def output(x):
        return torch.tanh(x * weight)

    checkpointed = checkpoint(output, checkpoint(output, x + bias, use_reentrant=True), use_reentrant=True)
    checkpointed.sum().backward()
    of_weight, of_bias = torch.autograd.grad(output(output(x + bias)).sum(), [weight, bias])
    optimizer.step()
    assert len(seen) == 2
    torch.testing.assert_close([seen[-1], weight.detach(), bias.detach()],
                               [of_weight, 0.5 - of_weight, 0.5 - of_bias / 2])


# -------------------------------------------------------------------------------------------------- unused parameters


@on_ranks(2, n=[1, 9, 10])
def test_parameters_without_gradient_are_an_error_on_every_rank_that_names_nine(rank, n):
    params = [parameter_of(1, rank) for _ in range(n + 1)]
    optimizer = sgd_of(FOUR, [(f"layer {i}", param) for i, param in enumerate(params)], **SMALL)
    sum(param.sum() for param in (params if rank.rank else params[:1])).backward()
    names = ", ".join(f"layer {i}" for i in range(1, min(n, 9) + 1)) + " and others" * (n == 10)
    with pytest.raises(RuntimeError, match=f"for parameter {names}: call backward.* find_unused_parameters"):
        optimizer.step()
    assert all(param.eq(1).all() for param in params)


# --------------------------------------------------------------------------------------- overlap, and what is under way


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_an_optimizer_does_not_keep_a_group_that_is_destroyed(reduce_dtype):
    """gloo's threads would end with the interpreter then, and abort it now and then."""
    with one_rank_of(4):
        group, model = weakref.ref(dist.group.WORLD), Branches(seed=0)
        optimizer = DistributedOptimizer(model.parameters(), reduce_dtype=reduce_dtype, **ADAMW)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
    gc.collect()
    assert group() is None


def test_what_had_left_when_its_optimizer_was_dropped_is_kept_until_it_has_arrived():
    with one_rank_of(2):
        weight, work = torch.nn.Parameter(torch.ones(40)), mock.Mock()
        optimizer = DistributedOptimizer([weight], lr=0.1)
        optimizer.buckets[0].transport.reduce_scatter = lambda sent, received, gradient: ([work], [])
        weight.sum().backward()
        sent = optimizer.travelling[0].sent
        del optimizer
        for is_done in (False, True):
            work.is_completed.return_value = is_done
            DistributedOptimizer([weight], lr=0.1)
            assert any(message[0] == [work] and message[1] is sent for message in UNDER_WAY) == (not is_done)


@pytest.mark.parametrize("fails", [False, True])
def test_an_optimizer_that_is_dropped_waits_for_its_parameters(fails):
    """If they can't arrive, that is a warning, and an error for whoever reads them."""
    with one_rank_of(2):
        weight, work = torch.nn.Parameter(torch.ones(40)), mock.Mock()
        optimizer = DistributedOptimizer([weight], lr=0.1)
        optimizer.prefetch_params(torch.nn.ParameterList([weight]))
        optimizer.buckets[0].transport.all_gather = lambda shards: [work]
        weight.sum().backward()
        optimizer.step()
        work.wait.side_effect = RuntimeError("connection closed") if fails else None
        lost = pytest.warns(UserWarning, match=r"\(connection closed\): call finish_param_sync\(\) before")
        with lost if fails else contextlib.nullcontext():
            del optimizer
        assert isinstance(weight, Awaited) == fails and work.wait.called
        with pytest.raises(RuntimeError, match="connection closed") if fails else contextlib.nullcontext():
            assert weight.sum().isfinite()


def test_no_stage_waits_for_the_whole_device():
    paths = [path for stage in STAGES for path in (ROOT / stage).glob("*.py")]
    assert len(paths) > 20 and not [path for path in paths if "synchronize(" in path.read_text()]
