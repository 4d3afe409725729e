"""Stage 4: overlap that is right whatever the schedule, and that overlaps. And bugs of real systems."""

import collections
import contextlib
import copy
import functools
import gc
import io
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.ledger import Ledger
from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import Awaited
from stage4_overlap.drops import UNDER_WAY
from stage4_overlap.transport import GlooTransport, Transport
from tests.common import STAGES, batch, loss_of, on_its_device, on_ranks, one_rank_of, situation
from tests.pairs import SMALL, Pair, assert_same, deliver_when_asked, exact, parameter_of, sgd_of
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


# ------------------------------------------------------------------------------------- 16 bits on the wire, fp32 sums


def branches(rank, dtype=torch.float32, prefetch=True, **own):
    net = functools.partial(Branches, dtype=dtype)
    return Pair(rank, FOUR, net=net, own={**SMALL, **own}, rounds={"sum_dtype": torch.float32}, prefetch=prefetch,
                **ADAMW)


@on_ranks(dtype=[torch.float32, torch.bfloat16, torch.float16], bucket_cap_mb=[1e-6, 0.0002, None])
def test_results_do_not_depend_on_the_size_of_the_buckets(rank, dtype, bucket_cap_mb):
    """Parameters are to the bit those of one process."""
    reduce_dtype = None if rank.backend == "gloo" else torch.float32
    pair = branches(rank, dtype, bucket_cap_mb=bucket_cap_mb, reduce_dtype=reduce_dtype)
    pair.train(0, 1, 2, 3)
    assert_same(*pair.models, exact=True)


@on_ranks(2)
def test_a_native_reduce_scatter_gives_what_an_exchange_gives(rank):
    """gloo's own reduce-scatter and all-gather stand for those of NCCL; its average is a sum of what is divided."""
    gloos = dist.reduce_scatter_tensor

    def averaged(output, full, op, **options):
        assert op == dist.ReduceOp.AVG
        return gloos(output, full.div_(rank.world_size), **options)

    for bucket_cap_mb in (1e-6, None):
        native = mock.patch.object(DistributedOptimizer, "transport_for", lambda _, group, *__: Transport(group))
        with native, mock.patch.object(dist, "reduce_scatter_tensor", averaged), Ledger() as ledger:
            pair = branches(rank, bucket_cap_mb=bucket_cap_mb)
            pair.train(0, 1, 2, 3)
            pair.optimizer.finish_param_sync()
        assert ledger.collectives["reduce_scatter"] == ledger.collectives["all_gather"] > 0
        assert_same(*pair.models, exact=True)


# ----------------------------------------------------------------------------------------------------------- prefetch


def starts(rank, model, x=None):
    """-> the optimizer of `model`, after a step whose parameters arrive when somebody waits for them; and the input."""
    optimizer = DistributedOptimizer(model.parameters(), **SMALL, **ADAMW)
    optimizer.prefetch_params(model)
    deliver_when_asked(optimizer)
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


@on_ranks(2)
def test_without_prefetch_step_waits_for_the_parameters(rank):
    pair = branches(rank, prefetch=False)
    deliver_when_asked(pair.optimizer)
    pair.train(0)
    assert pair.optimizer.buckets[0].param_sync is None
    assert type(pair.model.layers[0].weight) is torch.nn.Parameter
    assert_same(*pair.models, exact=True)


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(5, 7), torch.nn.Linear(7, 5)

    def forward(self, x):
        return self.head(self.embed(x))


class Listed(list):
    """A list of its own class, such as those of torch.fx."""


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return params_of(torch.load(file, weights_only=False))


def averaged(model):
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, n: new)
    average.update_parameters(model)
    average.update_parameters(model)
    return list(average.parameters())


def under_torch_func(model):
    """What is differentiated there are other tensors than the module's."""
    def function(params):
        return torch.func.functional_call(model, params, (torch.arange(5),)).square().mean()
    return list(torch.func.grad(function)(dict(model.named_parameters())).values())


# All that go past `model(…)`, or that read before it is called
READS = {
    "functional": lambda model: [torch.nn.functional.linear(torch.ones(7), model.head.weight)],
    "embedding, by another module": lambda model: [torch.nn.functional.embedding(torch.arange(5), model.embed.weight)],
    "model.forward": lambda model: [model.forward(torch.arange(5))],
    "in place": lambda model: [param.mul_(1.0) for param in model.parameters()],
    "foreach": lambda model: torch._foreach_add(list(model.parameters()), 1.0),
    "foreach of a list of its own": lambda model: torch._foreach_add(Listed(model.parameters()), 1.0),
    "cat of a list of its own": lambda model: [torch.cat(Listed([model.head.weight, model.embed.weight]))],
    "data": lambda model: [param.data.clone() for param in model.parameters()],
    "data_ptr": lambda model: [model.head.weight.data_ptr() * 0 + model.head.weight.data],
    "numpy": lambda model: [torch.tensor(model.head.bias.detach().cpu().numpy())],
    "item": lambda model: [torch.tensor(model.head.bias[0].item())],
    "parameters_to_vector": lambda model: [torch.nn.utils.parameters_to_vector(model.parameters())],
    "deepcopy": lambda model: params_of(copy.deepcopy(model)),
    "deepcopy of one": lambda model: [copy.deepcopy(model.head.weight)],
    "save": pickled,
    "state_dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "AveragedModel": averaged,
    "torch.func": under_torch_func,
    "repr": lambda model: [torch.tensor([ord(letter) for letter in repr(model.head.bias)])],
}


@on_ranks(2)
@on_its_device
def test_whoever_reads_past_the_hooks_sees_finished_parameters(rank):
    model = Words()
    optimizer, _ = starts(rank, model, torch.arange(5))
    for with_grad in (True, False):
        for how, read in READS.items():
            with situation((how, with_grad)):
                model(torch.arange(5)).square().mean().backward()
                optimizer.step()
                with torch.set_grad_enabled(with_grad and how != "in place"):
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
def test_what_is_frozen_or_written_into_while_it_is_under_way(rank):
    model, other = Branches(seed=0).to(rank.device), Branches(seed=5).to(rank.device)
    optimizer, x = starts(rank, model)
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    assert [param.requires_grad for param in model.parameters()] == [False] * 6 + [True] * 6
    model(x).sum().backward()
    optimizer.step()
    model.load_state_dict(other.state_dict())
    optimizer.finish_param_sync()
    assert equal(params_of(model), params_of(other))  # nothing arrives on top of it


@on_ranks(2)
@on_its_device
def test_a_model_without_the_hooks_can_become_torchscript(rank):
    model = Words()
    optimizer = DistributedOptimizer(model.parameters(), **SMALL, **ADAMW)
    handles = optimizer.prefetch_params(model)
    assert optimizer.prefetch_params(model) == []  # each module has its hook
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    expected = model(torch.arange(5))
    for handle in handles:
        handle.remove()
    assert torch.equal(torch.jit.script(model)(torch.arange(5)), expected)


class Experts(torch.nn.Module):
    """Its weights are in containers, which nobody calls, and torch.func reads them past torch's functions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterDict({"experts": torch.randn(3, 7, 7)})
        self.more = torch.nn.ModuleList([torch.nn.ParameterList([torch.randn(7, 7)]), torch.nn.Linear(7, 7)])

    def forward(self, x):
        experts = self.weights["experts"]
        x = torch.vmap(lambda weight: torch.tanh(x @ weight))(experts).sum(dim=0)
        x = x + torch.func.vjp(torch.sin, self.more[0][0])[1](x.new_ones(7, 7))[0].sum()
        return self.more[1](x) + torch.func.grad(lambda weight: weight.square().sum())(experts).sum()


@on_ranks(2)
def test_a_module_waits_for_the_containers_in_it(rank):
    model, under_way = Experts().to(rank.device), []
    optimizer, x = starts(rank, model)
    look = model.register_forward_pre_hook(lambda *_: under_way.extend(
        name for name, param in model.named_parameters() if isinstance(param, Awaited)))
    with torch.no_grad():
        first = model(x)
        look.remove()
        optimizer.finish_param_sync()
        assert torch.equal(first, model(x))
    assert under_way == ["more.1.weight", "more.1.bias"]


class Odd(torch.nn.Module):
    """torch's attention reads the weight of its out_proj without calling it; `gain` is of a module with children."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.attention = torch.nn.MultiheadAttention(7, 1, batch_first=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(4))
        self.gain = torch.nn.Parameter(torch.ones(7))

    def block(self, x):
        for i in (2, 0, 3, 2):  # out of order, one twice
            x = x + torch.tanh(self.layers[i](x))
        return x

    def forward(self, x):
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        x = self.block(x) if self.how is None else checkpoint(self.block, x, use_reentrant=self.how == "reentrant")
        return self.layers[1](x) * self.gain


def prefetched(rank, how, after_step=lambda: None, backend=None):
    """Four steps of a model that is compiled if there is a backend, and evaluated once in between."""
    pair = Pair(rank, FOUR, net=lambda seed: Odd(how), own=SMALL, prefetch=True, **ADAMW)
    (model, reference), optimizer = pair.models, pair.optimizer
    deliver_when_asked(optimizer)
    reference.how = None  # torch.autograd.grad can't go through reentrant checkpointing
    forward = torch.compile(model, backend=backend) if backend else model
    for step in range(4):
        x, y = batch(step, rank.rank, device=rank.device)
        loss_of(forward, x.requires_grad_(), y).backward()
        pair.replicated.backward(step)
        pair.step()
        after_step()
        assert any(bucket.param_sync is not None for bucket in optimizer.buckets)
        if step == 1 and not backend:
            model.eval()
            with torch.no_grad():
                assert torch.equal(forward(x), reference(x))
            model.train()
    # Reentrant: the two gradients of the layer that is called twice are added one by one.
    pair.assert_same(how != "reentrant")


@on_ranks(2, how=[None, "reentrant", "non-reentrant"])
def test_prefetch_under_checkpointing_out_of_order_and_twice(rank, how):
    prefetched(rank, how)


@on_ranks(2)
def test_a_prefetched_model_is_not_compiled_anew_in_each_step(rank):
    """torch's attention reads parameters of a module that it doesn't call, and a guard looks at their class."""
    graphs, seen = [], []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    prefetched(rank, None, lambda: seen.append(len(graphs)), backend)
    assert seen[-1] == seen[2], seen


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


@on_ranks(2)
def test_an_encoder_is_evaluated_after_a_step_as_at_any_time(rank):
    """In eval torch's encoder asks the parameters of its first layer, which it doesn't call, for their class."""
    padding = torch.tensor([[False, False, True]], device=rank.device)
    for whole in (True, False):
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        model = torch.nn.TransformerEncoder(layer, 2).to(rank.device)
        x = torch.linspace(0, 1, 24, device=rank.device).view(1, 3, 8)
        optimizer, _ = starts(rank, model, x)
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


@on_ranks(2)
def test_a_layer_that_was_replaced_is_not_kept(rank):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(rank.device)
    DistributedOptimizer(model.parameters()).prefetch_params(model)
    old = weakref.ref(model[1].weight)
    model[1] = torch.nn.Linear(4, 2).to(rank.device)
    DistributedOptimizer(model.parameters()).prefetch_params(model)
    gc.collect()
    assert old() is None


# ------------------------------------------------------------------------------------- messages and hooks of the user's


@on_ranks(2)
def test_gradients_keep_out_of_other_messages(rank):
    """Messages of the user's with many tags, that of a step say, and of the size of a piece of gradients.

    Rank 0 has an optimizer in a group of its own, too: what both ranks share has the same tags nevertheless.
    """
    alone = dist.new_group([0])
    if rank.rank == 0:
        DistributedOptimizer(Branches(seed=1).to(rank.device).parameters(), process_group=alone, **ADAMW)
    pair = branches(rank, prefetch=False)
    tags, numel = range(990, 1400), pair.optimizer.buckets[0].shards.shape[1]
    theirs = [torch.zeros(numel, device=rank.device) for _ in tags]
    for step in range(3):
        sent = [torch.full((numel,), 7.0, device=rank.device) for _ in tags]
        works = [dist.isend(tensor, 0, tag=tag) for tensor, tag in zip(sent, tags)] if rank.rank else []
        pair.backward(step)
        works = works or [dist.irecv(tensor, 1, tag=tag) for tensor, tag in zip(theirs, tags)]
        pair.step()
        for work in works:
            work.wait()
        assert all(tensor.eq(7).all() for tensor in theirs) or rank.rank
    pair.assert_same()


@on_ranks(2)
def test_a_gradient_leaves_after_all_hooks_of_its_parameter(rank):
    """A hook of the user's on each parameter, later than the optimizer's, changes what is averaged."""
    def halve(param):
        param.grad.mul_(0.5)

    for cap_mb in (1e-6, 1):
        model = Branches(seed=0).to(rank.device)
        optimizer = DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, bucket_cap_mb=cap_mb)
        optimizer.prefetch_params(model)
        before = params_of(model)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(halve)
        x = torch.ones(2, 7, device=rank.device)
        grads = torch.autograd.grad(model(x).sum(), model.parameters())
        model(x).sum().backward()
        optimizer.step()
        for old, param, grad in zip(before, params_of(model), grads):
            torch.testing.assert_close(old - param, grad / 2)


@on_ranks(2)
def test_a_gradient_that_comes_twice_leaves_after_both_hooks(rank):
    """In re-entrant checkpoints, each a backward pass of its own: its gradient comes twice, and no other in between."""
    weight, bias = (torch.nn.Parameter(torch.full((4,), 0.5, device=rank.device)) for _ in range(2))
    optimizer = DistributedOptimizer([bias, weight], torch.optim.SGD, lr=1.0, **SMALL)
    seen, x = [], torch.ones(4, device=rank.device, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))

    def output(x):
        return torch.tanh(x * weight)

    checkpointed = checkpoint(output, checkpoint(output, x + bias, use_reentrant=True), use_reentrant=True)
    checkpointed.sum().backward()
    whole, = torch.autograd.grad(output(output(x + bias)).sum(), weight)
    optimizer.step()
    torch.testing.assert_close(seen[-1], whole)
    torch.testing.assert_close(weight.detach(), 0.5 - whole)
    assert len(seen) == 2


# -------------------------------------------------------------------------------------------------- unused parameters


USES = {
    "one on no rank": lambda rank, step: [0, 1, 2, 4, 5],
    "another one on each rank": lambda rank, step: [i for i in range(6) if i != rank],
    "others in each step": lambda rank, step: [i for i in range(6) if i not in ((step + rank) % 6, 3 + step % 3)],
    "one in the first step only": lambda rank, step: [0, 1, 3, 4, 5] if step else range(6),
}


@on_ranks(uses=USES)
def test_unused_parameters_like_ddp(rank, uses):
    model, other = Branches(seed=0).to(rank.device), Branches(seed=0).to(rank.device)
    ddp = DistributedDataParallel(other, find_unused_parameters=True)
    plain = torch.optim.AdamW(other.parameters(), **ADAMW)
    optimizer = DistributedOptimizer(model.parameters(), find_unused_parameters=True, **SMALL, **ADAMW)
    optimizer.prefetch_params(model)
    for step in range(5):
        x, y = batch(step, rank.rank, device=rank.device)
        for one, its_optimizer in ((ddp, plain), (model, optimizer)):
            torch.nn.functional.mse_loss(one(x, USES[uses](rank.rank, step)), y).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert_same(model, other, exact(rank))


@on_ranks(2, n=[1, 9, 10])
def test_parameters_without_gradient_are_an_error_on_every_rank_that_names_nine(rank, n):
    params = [parameter_of(1, rank) for _ in range(n + 1)]
    named = [(f"layer {i}", param) for i, param in enumerate(params)]
    optimizer = sgd_of(FOUR, named, **SMALL)
    sum(param.sum() for param in (params if rank.rank else params[:1])).backward()
    names = ", ".join(f"layer {i}" for i in range(1, min(n, 9) + 1)) + " and others" * (n == 10)
    with pytest.raises(RuntimeError, match=f"for parameter {names}: call backward.* find_unused_parameters"):
        optimizer.step()
    assert all(param.eq(1).all() for param in params)
    sum(param.sum() for param in params).backward()  # and training can go on
    optimizer.step()
    assert all(param.eq(0).all() for param in params)


# ------------------------------------------------------------------------------------------------------------- overlap


@on_ranks(2)
def test_a_bucket_is_sent_and_received_while_backward_goes_on(rank):
    """Between the layers the mean of the last one's gradients has come, and it has none; nor has the first one yet."""
    first, last = (torch.nn.Linear(4, 4, bias=False).to(rank.device) for _ in range(2))
    optimizer = DistributedOptimizer([first.weight, last.weight], lr=0.1, **SMALL)
    arrived = []

    def look(_):
        optimizer.receive_oldest()
        grads = first.weight.grad, last.weight.grad
        arrived.append((optimizer.buckets[0].gradient.shard[:1].tolist(), *grads, len(optimizer.queue)))

    hidden = first(torch.ones(4, device=rank.device)) * 0 + 1 + rank.rank  # 1 on rank 0, 2 on rank 1
    hidden.register_hook(look)
    last(hidden).sum().backward()
    of_rank = [1.5] if rank.rank == 0 else [0.0]  # all 16 elements are those of rank 0, rank 1 has padding
    assert arrived == [(of_rank, None, None, 1)]
    optimizer.step()


# ------------------------------------------------------------------------------------------------------------- device


class Written(TorchDispatchMode):
    """Which operators wrote into the memory at `places`, of the tensors in `of`."""

    def __init__(self):
        super().__init__()
        self.places, self.names = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = args[0] if args else None
        tensors = first if isinstance(first, (list, tuple)) else [first]
        if any(isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() in self.places for one in tensors):
            self.names += [func._schema.name.removeprefix("aten::")] * func._schema.is_mutable
        return func(*args, **kwargs or {})


def test_the_native_reduce_scatter_where_it_is_one():
    """Everywhere but on gloo: one operator a bucket, which averages, straight into the shard. Of a second micro-batch
    the average lands in the bucket buffer, and is added."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        model = Branches(seed=0)
        optimizer = DistributedOptimizer(model.parameters(), **SMALL, **ADAMW)
        with Ledger() as ledger:
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        assert ledger.collectives == {"reduce_scatter": 12, "all_reduce": 1, "all_gather": 12}
        landed, native, written = [], dist.reduce_scatter_tensor, Written()
        written.places = {memory.untyped_storage().data_ptr() for memory in [
            *(buffer.sent for buffer in optimizer.idle), *(bucket.gradient.shard for bucket in optimizer.buckets)]}

        def noted(output, full, op, **options):
            assert op == dist.ReduceOp.AVG and optimizer.idle[0].transport.rank == 1
            landed.append((output.data_ptr(), full.data_ptr() + output.nbytes))
            return native(output, full, op, **options)

        with mock.patch.object(dist, "reduce_scatter_tensor", noted), written:
            for _ in range(2):
                model(torch.ones(2, 7)).sum().backward()
            optimizer.sync_grads()
        shards = [bucket.gradient.shard.data_ptr() for bucket in optimizer.buckets]
        assert [place for place, _ in landed[:12]] == shards
        assert all(place == own_part for place, own_part in landed[12:])  # in place, where NCCL wants it
        assert collections.Counter(written.names) == {"_foreach_copy_": 24, "add_": 12}
    finally:
        dist.destroy_process_group()


def test_an_optimizer_does_not_keep_a_group_that_is_destroyed():
    """gloo's threads would end with the interpreter then, and abort it now and then."""
    for reduce_dtype in (None, torch.float32):
        with one_rank_of(4):
            group, model = weakref.ref(dist.group.WORLD), Branches(seed=0)
            optimizer = DistributedOptimizer(model.parameters(), reduce_dtype=reduce_dtype, **ADAMW)
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        gc.collect()
        assert group() is None, reduce_dtype


class Unfinished:
    """The work of a message that other ranks have not taken yet."""

    is_done = False

    def is_completed(self):
        return self.is_done

    def wait(self):
        self.is_done = True


def test_what_had_left_when_its_optimizer_was_dropped_is_kept_until_it_has_arrived():
    with one_rank_of(2):
        weight, work = torch.nn.Parameter(torch.ones(40)), Unfinished()
        optimizer = DistributedOptimizer([weight], lr=0.1)
        optimizer.buckets[0].transport.reduce_scatter = lambda sent, received, gradient: ([work], [])
        weight.sum().backward()
        sent = optimizer.travelling[0].sent
        del optimizer
        for is_done in (False, True):
            work.is_done = is_done
            DistributedOptimizer([weight], lr=0.1)
            assert any(message[0] == [work] and message[1] is sent for message in UNDER_WAY) == (not is_done)


def test_an_optimizer_that_is_dropped_waits_for_its_parameters():
    """If they can't arrive, that is a warning, and an error for whoever reads them."""
    def fail():
        raise RuntimeError("connection closed")

    for fails in (False, True):
        with one_rank_of(2):
            weight, work = torch.nn.Parameter(torch.ones(40)), Unfinished()
            optimizer = DistributedOptimizer([weight], lr=0.1)
            optimizer.prefetch_params(torch.nn.ParameterList([weight]))
            optimizer.buckets[0].transport.all_gather = lambda shards: [work]
            weight.sum().backward()
            optimizer.step()
            if fails:
                work.wait = fail
            lost = pytest.warns(UserWarning, match=r"\(connection closed\): call finish_param_sync\(\) before")
            with lost if fails else contextlib.nullcontext():
                del optimizer
            assert isinstance(weight, Awaited) == fails and work.is_done != fails
            with pytest.raises(RuntimeError, match="connection closed") if fails else contextlib.nullcontext():
                assert weight.sum().isfinite()


@on_ranks(2)
def test_works_that_are_done_stay_until_the_next(rank):
    """Were gloo's thread the last to hold one, it would need the GIL, and abort where Python ends: 6 runs of 30 did."""
    model = Branches(seed=0).to(rank.device)
    optimizer = DistributedOptimizer(model.parameters(), **SMALL, **ADAMW)
    start, works = GlooTransport.all_gather, []

    def watched(transport, shards):
        started = start(transport, shards)
        works.extend(map(weakref.ref, started))
        return started

    with mock.patch.object(GlooTransport, "all_gather", watched):
        for step in range(2):
            works.clear()
            model(batch(step, rank.rank, device=rank.device)[0]).sum().backward()
            optimizer.step()
            assert len(works) == 12 * rank.world_size and all(work() is not None for work in works)


def test_no_stage_waits_for_the_whole_device():
    paths = [path for stage in STAGES for path in (ROOT / stage).glob("*.py")]
    assert len(paths) > 20 and not [path for path in paths if "synchronize(" in path.read_text()]
