"""Stage 4 is right whatever the order of gradients, messages and reads is, and it overlaps.

Most situations come from bugs of other systems.
"""

import contextlib
import copy
import functools
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness import STAGE_3, STAGE_4
from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import Awaited
from stage4_overlap.transport import Transport
from tests.common import batch, loss_of, of_cpus, on_its_device, on_ranks, one_rank_of
from tests.pairs import SMALL, Pair, assert_same, deliver_when_asked, parameter_of, sgd_of

ADAMW = {"lr": 0.01, "weight_decay": 0.1, "fused": True}


class Branches(nn.Module):
    """Six layers beside each other, so that gradients come in the reverse order of the calls."""

    def __init__(self, seed, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.dtype = dtype
        self.layers = nn.ModuleList(nn.Linear(7, 7, dtype=dtype) for _ in range(6))

    def forward(self, x):
        x = x.to(self.dtype)
        return sum(torch.tanh(layer(x)) for layer in self.layers).float()


def pair_of_branches(rank, dtype=torch.float32, prefetch=True, **own):
    net = functools.partial(Branches, dtype=dtype)
    return Pair(rank, STAGE_4, net=net, own={**SMALL, **own}, prefetch=prefetch, **ADAMW)


@on_ranks(dtype=[torch.float32, torch.bfloat16, torch.float16], bucket_cap_mb=[1e-6, 0.0002, None])
def test_results_do_not_depend_on_the_size_of_the_buckets(rank, dtype, bucket_cap_mb):
    """Send 16 bits and add in fp32: parameters are to the bit those of one process.

    Gloo's sums are in fp32 without `reduce_dtype`, also where the group names gloo by device. Works that are done stay
    until the next ones. If gloo's thread were the last to hold a work, it would need the GIL, and abort as Python ends.
    """
    own = {"reduce_dtype": torch.float32}
    if rank.backend == "gloo":
        own = {"process_group": dist.new_group(backend="cpu:gloo")}
    pair = pair_of_branches(rank, dtype, bucket_cap_mb=bucket_cap_mb, **own)
    pair.train(0, 1, 2, 3)
    assert_same(*pair.models, exact=True)
    assert all(bucket.param_sync is None and bucket.last_param_sync for bucket in pair.optimizer.buckets)


@on_ranks(2, bucket_cap_mb=[1e-6, None])
def test_a_native_reduce_scatter_gives_what_an_exchange_gives(rank, bucket_cap_mb):
    """Average by gloo's own collective in place of NCCL's: parameters are those of one process, to the bit.

    The average of a first micro-batch lands in the shard. That of a second one lands in this rank's part of what is
    sent, and is added then.
    """
    gloos_reduce_scatter = dist.reduce_scatter_tensor
    outputs = []  # address of what each collective writes
    own_parts = []  # address of this rank's part of what it reads

    def averaged(output, whole, op, **options):
        assert op == dist.ReduceOp.AVG
        outputs.append(output.data_ptr())
        own_parts.append(whole.data_ptr() + rank.number * output.nbytes)
        return gloos_reduce_scatter(output, whole.div_(rank.world_size), **options)

    native = mock.patch.object(DistributedOptimizer, "transport_for", lambda _, group, *__: Transport(group))
    with native, mock.patch.object(dist, "reduce_scatter_tensor", averaged):
        pair = pair_of_branches(rank, bucket_cap_mb=bucket_cap_mb)
        pair.train(0, 1)
        assert_same(*pair.models, exact=True)
        pair.backward(2, 3)
        pair.step()
    pair.assert_same(is_exact=False)
    shards = [bucket.gradient.shard.data_ptr() for bucket in pair.optimizer.buckets]
    assert outputs == [*shards * 3, *own_parts[-len(shards) :]]


# ----------------------------------------------------------------------------------------------------------- prefetch


def with_params_in_flight(rank, model, x):
    """Return the optimizer of `model` after a step. Its parameters arrive when somebody waits for them."""
    optimizer = DistributedOptimizer(model.parameters(), **SMALL, **ADAMW)
    optimizer.prefetch_params(model)
    deliver_when_asked(optimizer)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(bucket.param_sync is not None for bucket in optimizer.buckets)
    return optimizer


def input_of(rank):
    return batch(0, rank.number, device=rank.device)[0]


@on_ranks
def test_a_module_waits_for_its_own_buckets_and_for_no_others(rank):
    """Call a model while all its parameters are in flight: when a layer is called, only later layers are in flight."""
    model = Branches(seed=0).to(rank.device)
    optimizer = with_params_in_flight(rank, model, input_of(rank))
    in_flight = []  # for each call of a layer: whether each layer is in flight
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda *_: in_flight.append([isinstance(other.weight, Awaited) for other in model.layers]))
    model(input_of(rank))
    assert in_flight == [[other > called for other in range(6)] for called in range(6)]
    assert not any(bucket.param_sync for bucket in optimizer.buckets)


def clones_of(tensors):
    return [tensor.detach().clone() for tensor in tensors]


READS = {  # model -> tensors, which were read without a call of the model
    "foreach": lambda model: torch._foreach_add(list(model.parameters()), 1.0),
    "data": lambda model: clones_of(param.data for param in model.parameters()),
    "deepcopy": lambda model: clones_of(copy.deepcopy(model).parameters()),
    "pickle": lambda model: clones_of(pickle.loads(pickle.dumps(model)).parameters()),
    "repr": lambda model: [torch.tensor([ord(letter) for letter in repr(model.layers[0].bias)])],
}


@on_ranks(2, how=READS)
@on_its_device
def test_whoever_reads_past_the_hooks_sees_finished_parameters(rank, how):
    """Read parameters that are in flight, and again when all have arrived: the values are the same."""
    model = Branches(seed=0).to(rank.device)
    optimizer = with_params_in_flight(rank, model, input_of(rank))
    model.zero_grad()
    assert [param.shape for param in model.parameters()] == [(7, 7), (7,)] * 6
    assert not hasattr(model.layers[0].weight, "to_local")  # many programs take what has it for a DTensor
    assert all(bucket.param_sync for bucket in optimizer.buckets)  # the three lines above needed no waiting
    first = READS[how](model)
    optimizer.finish_param_sync()
    assert all(map(torch.equal, first, READS[how](model)))
    assert not any(isinstance(tensor, Awaited) for tensor in first)
    assert all(type(param) is nn.Parameter for param in model.parameters())


class Odd(nn.Module):
    """Reads the parameters of a container by vmap, which bypasses torch's functions, and those inside of attention.

    The model calls layers out of order, and one of them twice. `how`: whether these calls are checkpointed.
    """

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.experts = nn.ParameterDict({"all": torch.randn(3, 7, 7)})
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def block(self, x):
        for i in (2, 0, 3, 2):
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
    """Take four steps. The last one needs no new graph, though torch.compile guards on classes."""
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
    assert n_graphs_after[-1] == n_graphs_after[2]
    assert bool(graphs) == (how == "compiled")
    # Reentrant: the two gradients of the layer that is called twice are added one by one.
    pair.assert_same(how != "reentrant")


@on_ranks(2)
def test_modules_wait_for_all_that_a_function_of_torch_func_reads(rank):
    """Compute gradients by torch.func, which gives the modules other tensors while it calls them."""
    pair = pair_of_branches(rank)
    deliver_when_asked(pair.optimizer)
    for step in range(2):
        x, y = batch(step, rank.number, device=rank.device)

        def loss_of_params(params, x=x, y=y):
            return F.mse_loss(torch.func.functional_call(pair.model, params, (x,)), y)

        params = dict(pair.model.named_parameters())
        for name, grad in torch.func.grad(loss_of_params)(params).items():
            params[name].grad = grad
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
    """Evaluate torch's encoder while parameters are in flight. It checks the class of parameters of its first layer."""
    padding = torch.tensor([[False, False, True]], device=rank.device)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).to(rank.device)
    x = torch.linspace(0, 1, 24, device=rank.device).view(1, 3, 8)
    optimizer = with_params_in_flight(rank, model, x)
    model.eval()
    with torch.no_grad():
        first = model(x, src_key_padding_mask=padding)
        optimizer.finish_param_sync()
        assert torch.equal(first, model(x, src_key_padding_mask=padding))


# ------------------------------------------------------------------------------------- messages and hooks of the user's


@on_ranks(3)
def test_gradients_keep_out_of_other_messages(rank):
    """Run backward passes of two optimizers, in one order on rank 0 and in the other order on the other ranks.

    Before, rank 1 sends rank 0 a message of the user's, as large as those of gradients and with torch's default tag.
    Rank 0 receives it afterwards. And rank 0 alone has made a third optimizer, in a group of its own. All this needs
    gloo, where messages have tags: NCCL's collectives, and so DDP's, must come in one order on all ranks.
    """
    on_cpu, group = of_cpus(rank)
    if rank.number == 0:
        alone = dist.new_group([0], backend="gloo", use_local_synchronization=True)
        sgd_of(STAGE_4, [parameter_of(0, on_cpu)], process_group=alone)
    params = [parameter_of(0, on_cpu) for _ in range(2)]
    optimizers = [sgd_of(STAGE_4, [param], process_group=group) for param in params]
    message = torch.full_like(optimizers[0].buckets[0].shards[0], rank.number)
    if rank.number == 1:
        work = dist.isend(message, 0, group=group)
    order = (0, 1) if rank.number == 0 else (1, 0)
    for i in order:
        (params[i].sum() * (i + 1)).backward()
    for i, optimizer in enumerate(optimizers):
        optimizer.step()
        assert params[i].unique().tolist() == [-1 - i]
    if rank.number == 0:
        dist.recv(message, 1, group=group)
        assert message.eq(1).all()
    if rank.number == 1:
        work.wait()


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
    hidden = checkpoint(output, x + bias, use_reentrant=True)
    checkpoint(output, hidden, use_reentrant=True).sum().backward()
    optimizer.step()
    assert len(seen) == 2
    torch.testing.assert_close(seen[-1], of_weight)
    torch.testing.assert_close(weight.detach(), 0.5 - of_weight)
    torch.testing.assert_close(bias.detach(), 0.5 - of_bias / 2)


# -------------------------------------------------------------------------------------------------- unused parameters


@on_ranks(2)
def test_parameters_without_gradient_are_an_error_on_every_rank_that_names_nine(rank):
    """Let rank 0 use the first of eleven parameters alone, and rank 1 all of them."""
    params = [parameter_of(1, rank) for _ in range(11)]
    optimizer = sgd_of(STAGE_4, [(f"layer {i}", param) for i, param in enumerate(params)], **SMALL)
    used = params if rank.number else params[:1]
    sum(param.sum() for param in used).backward()
    names = ", ".join(f"layer {i}" for i in range(1, 10))
    with pytest.raises(RuntimeError, match=f"for parameter {names} and others: call .* find_unused_parameters"):
        optimizer.step()
    assert all(param.eq(1).all() for param in params)


# --------------------------------------------------------------------------------------- overlap, and what is under way


@pytest.mark.parametrize("fails", [False, True])
def test_an_optimizer_that_is_dropped_waits_for_its_parameters(fails):
    """Drop an optimizer while parameters are in flight. If they can't arrive, there is a warning.

    Whoever reads a parameter that can't arrive gets an error.
    """
    with one_rank_of(2):
        weight = nn.Parameter(torch.ones(40))
        work = mock.Mock()
        optimizer = DistributedOptimizer([weight], lr=0.1)
        optimizer.prefetch_params(nn.ParameterList([weight]))
        optimizer.buckets[0].transport.all_gather = lambda shards: [work]
        weight.sum().backward()
        optimizer.step()
        work.wait.side_effect = RuntimeError("connection closed") if fails else None
        lost = pytest.warns(UserWarning, match=r"\(connection closed\): call finish_param_sync\(\) before")
        with lost if fails else contextlib.nullcontext():
            del optimizer
        assert isinstance(weight, Awaited) == fails
        assert work.wait.called
        with pytest.raises(RuntimeError, match="connection closed") if fails else contextlib.nullcontext():
            assert weight.sum().isfinite()
