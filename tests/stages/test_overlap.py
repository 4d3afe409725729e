"""Stage 4: overlap that is right whatever the schedule, and that overlaps. And bugs of real systems."""

import contextlib
import copy
import functools
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness import STAGE_3, STAGE_4
from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import Awaited
from stage4_overlap.transport import Transport
from tests.common import batch, loss_of, on_its_device, on_ranks, one_rank_of
from tests.pairs import SMALL, Pair, WhenAsked, assert_same, deliver_when_asked, parameter_of, sgd_of

ADAMW = {"lr": 0.01, "weight_decay": 0.1, "fused": True}



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
    return Pair(rank, STAGE_4, net=net, own={**SMALL, **own}, rounds={"sum_dtype": torch.float32}, prefetch=prefetch,
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
    """Average by gloo's own collective in place of NCCL's: parameters are those of one process, to the bit.

    An average lands in the shard; that of a second micro-batch in this rank's part of what is sent, and is added.
    """
    gloos_reduce_scatter = dist.reduce_scatter_tensor
    landed = []  # of each collective: addresses of the output, and of this rank's part of the input

    def averaged(output, full, op, **options):
        assert op == dist.ReduceOp.AVG
        landed.append((output.data_ptr(), full.data_ptr() + rank.number * output.nbytes))
        return gloos_reduce_scatter(output, full.div_(rank.world_size), **options)

    native = mock.patch.object(DistributedOptimizer, "transport_for", lambda _, group, *__: Transport(group))
    with native, mock.patch.object(dist, "reduce_scatter_tensor", averaged):
        pair = branches(rank, bucket_cap_mb=bucket_cap_mb)
        pair.train(0, 1)
        assert_same(*pair.models, exact=True)
        pair.backward(2, 3)
        pair.step()
    pair.assert_same(is_exact=False)
    shards = [bucket.gradient.shard.data_ptr() for bucket in pair.optimizer.buckets]
    added_from = [own_part for _, own_part in landed[-len(shards):]]
    assert [output for output, _ in landed] == shards * 3 + added_from


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
    x = batch(0, rank.number, device=rank.device)[0] if x is None else x
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


READS = {  # past `model(…)`, or before it is called
    "functional": lambda model: [F.linear(torch.ones(7), model.layers[0].weight)],
    "foreach": lambda model: torch._foreach_add(list(model.parameters()), 1.0),
    "data": lambda model: [param.data.clone() for param in model.parameters()],
    "data_ptr": lambda model: [model.layers[0].weight.data_ptr() * 0 + model.layers[0].weight.data],
    "deepcopy": lambda model: params_of(copy.deepcopy(model)),
    "pickle": lambda model: params_of(pickle.loads(pickle.dumps(model))),
    "state_dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "repr": lambda model: [torch.tensor([ord(letter) for letter in repr(model.layers[0].bias)])],
}


@on_ranks(2, how=READS, with_grad=[True, False])
@on_its_device
def test_whoever_reads_past_the_hooks_sees_finished_parameters(rank, how, with_grad):
    """Read parameters that are under way, and again when all have arrived: the values are the same."""
    model = Branches(seed=0).to(rank.device)
    optimizer, _ = starts(rank, model)
    with torch.set_grad_enabled(with_grad):
        model.zero_grad()
        assert [param.shape for param in model.parameters()] == [(7, 7), (7,)] * 6
        assert not hasattr(model.layers[0].weight, "to_local")  # many take what has it for a DTensor
        assert all(bucket.param_sync for bucket in optimizer.buckets)  # all that needed no waiting
        first = READS[how](model)
        optimizer.finish_param_sync()
        then = READS[how](model)
    assert equal(first, then) and not any(isinstance(tensor, Awaited) for tensor in first)
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())


@on_ranks(2)
def test_what_is_written_while_it_is_under_way_stays(rank):
    """Load other values while parameters are under way: nothing arrives on top of them."""
    model, other = (Branches(seed).to(rank.device) for seed in (0, 5))
    optimizer, _ = starts(rank, model, deliver=deliver_what_was_sent)
    model.load_state_dict(other.state_dict())
    optimizer.finish_param_sync()
    assert equal(params_of(model), params_of(other))


class Odd(torch.nn.Module):
    """Reads parameters of modules that it doesn't call: a container's, past torch's functions by vmap; out_proj."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.experts = torch.nn.ParameterDict({"all": torch.randn(3, 7, 7)})
        self.attention = torch.nn.MultiheadAttention(7, 1, batch_first=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(4))

    def block(self, x):
        for i in (2, 0, 3, 2):  # out of order, one twice
            x = x + torch.tanh(self.layers[i](x))
        return x

    def forward(self, x):
        x = x @ torch.vmap(torch.tanh)(self.experts["all"]).mean(dim=0)
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        if self.how in ("reentrant", "non-reentrant"):
            x = checkpoint(self.block, x, use_reentrant=self.how == "reentrant")
        else:
            x = self.block(x)
        return self.layers[1](x)


@on_ranks(2, how=["plain", "reentrant", "non-reentrant", "compiled"])
def test_prefetch_out_of_order_twice_past_the_hooks_checkpointed_or_compiled(rank, how):
    """Take four steps, and evaluate in between. No new graphs, though torch.compile guards on classes."""
    graphs = []
    n_graphs_after = []  # each step

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    pair = Pair(rank, STAGE_4, net=lambda seed: Odd(how), own=SMALL, prefetch=True, **ADAMW)
    model, reference = pair.models
    deliver_when_asked(pair.optimizer)
    reference.how = "plain"  # torch.autograd.grad can't go through reentrant checkpointing
    forward = torch.compile(model, backend=backend) if how == "compiled" else model
    for step in range(4):
        x, y = batch(step, rank.number, device=rank.device)
        loss_of(forward, x.requires_grad_(), y).backward()
        pair.replicated.backward(step)
        pair.step()
        n_graphs_after.append(len(graphs))
        assert any(bucket.param_sync is not None for bucket in pair.optimizer.buckets)
        if step == 1 and how != "compiled":
            with torch.no_grad():
                assert torch.equal(*(one.eval()(x) for one in pair.models))
            model.train()
    assert n_graphs_after[-1] == n_graphs_after[2] and bool(graphs) == (how == "compiled")
    # Reentrant: the two gradients of the layer that is called twice are added one by one.
    pair.assert_same(how != "reentrant")


@on_ranks(2)
def test_modules_wait_for_all_that_a_function_of_torch_func_reads(rank):
    """Compute gradients by torch.func: what modules have while it calls them are other tensors."""
    pair = Pair(rank, STAGE_4, own=SMALL, prefetch=True, **ADAMW)
    deliver_when_asked(pair.optimizer)
    for step in range(2):
        params = {name: param for name, param in pair.model.named_parameters() if param.requires_grad}
        x, y = batch(step, rank.number, device=rank.device)
        grad = torch.func.grad(lambda params: F.mse_loss(torch.func.functional_call(pair.model, params, (x,)), y))
        for name, value in grad(params).items():
            params[name].grad = value
        pair.replicated.backward(step)
        pair.step()
    pair.assert_same(is_exact=False)


@on_ranks(2, stage=[STAGE_3, STAGE_4])
def test_a_compiled_function_may_go_backward_and_step(rank, stage):
    pair = Pair(rank, stage, net=Branches, prefetch=stage == STAGE_4, **ADAMW)

    @torch.compile(backend="eager")
    def train(x, y):
        loss_of(pair.model, x, y).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()

    for step in range(3):
        train(*batch(step, rank.number, device=rank.device))
        pair.replicated.step(step)
    pair.assert_same()


@on_ranks(2)
def test_an_encoder_is_evaluated_after_a_step_as_at_any_time(rank):
    """In eval torch's encoder asks the parameters of its first layer, which it doesn't call, for their class."""
    padding = torch.tensor([[False, False, True]], device=rank.device)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 2).to(rank.device)
    _, x = starts(rank, model, torch.linspace(0, 1, 24, device=rank.device).view(1, 3, 8))
    model.eval()
    with torch.no_grad():
        first, second = (model(x, src_key_padding_mask=padding) for _ in range(2))
    assert torch.equal(first, second)


# ------------------------------------------------------------------------------------- messages and hooks of the user's


@on_ranks(2)
def test_gradients_keep_out_of_other_messages(rank):
    """Exchange as many elements as a piece of gradients has, with many tags, torch's default too.

    Rank 0 has an optimizer in a group of its own, too: what both ranks share has the same tags nevertheless.
    """
    alone = dist.new_group([0])
    if rank.number == 0:
        DistributedOptimizer(Branches(seed=1).to(rank.device).parameters(), process_group=alone, **ADAMW)
    pair = branches(rank, prefetch=False)
    sevens = torch.full_like(pair.optimizer.buckets[0].shards[0], 7.0)
    received = {tag: torch.zeros_like(sevens) for tag in [0, *range(990, 1400)]}
    works = []
    for tag, tensor in received.items():
        works.append(dist.isend(sevens, 0, tag=tag) if rank.number else dist.irecv(tensor, 1, tag=tag))
        if tag == 1200:
            pair.backward(0)
    pair.step()
    for work in works:
        work.wait()
    assert rank.number or all(tensor.eq(7).all() for tensor in received.values())
    # Without prefetch a step waits for parameters. Works that are done stay: were gloo's thread the last to hold
    # one, it would need the GIL, and abort where Python ends: 6 runs of 30 did.
    assert all(bucket.param_sync is None and bucket.last_param_sync for bucket in pair.optimizer.buckets)
    pair.assert_same()


@on_ranks(2, bucket_cap_mb=[1e-6, 1])
def test_a_gradient_leaves_after_all_hooks_of_its_parameter_also_if_it_comes_twice(rank, bucket_cap_mb):
    """Register hooks later than the optimizer's: one sees the gradient, one halves what is averaged.

    In re-entrant checkpoints, each a backward pass of its own, the gradient of `weight` comes twice.
    """
    weight, bias = parameter_of(0.5, rank), parameter_of(0.5, rank)
    optimizer = sgd_of(STAGE_4, [bias, weight], bucket_cap_mb=bucket_cap_mb)
    x = torch.ones(5, device=rank.device, requires_grad=True)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", bias.grad / 2))

    def output(x):
        return torch.tanh(x * weight)

    of_weight, of_bias = torch.autograd.grad(output(output(x + bias)).sum(), [weight, bias])
    checkpoint(output, checkpoint(output, x + bias, use_reentrant=True), use_reentrant=True).sum().backward()
    optimizer.step()
    assert len(seen) == 2
    torch.testing.assert_close([seen[-1], weight.detach(), bias.detach()],
                               [of_weight, 0.5 - of_weight, 0.5 - of_bias / 2])


# -------------------------------------------------------------------------------------------------- unused parameters


@on_ranks(2, n_unused=[1, 10])
def test_parameters_without_gradient_are_an_error_on_every_rank_that_names_nine(rank, n_unused):
    params = [parameter_of(1, rank) for _ in range(n_unused + 1)]
    optimizer = sgd_of(STAGE_4, [(f"layer {i}", param) for i, param in enumerate(params)], **SMALL)
    sum(param.sum() for param in (params if rank.number else params[:1])).backward()
    names = "layer 1" if n_unused == 1 else ", ".join(f"layer {i}" for i in range(1, 10)) + " and others"
    with pytest.raises(RuntimeError, match=f"for parameter {names}: call backward.* find_unused_parameters"):
        optimizer.step()
    assert all(param.eq(1).all() for param in params)


# --------------------------------------------------------------------------------------- overlap, and what is under way


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
