"""Stage 4: overlap that is right whatever the schedule, and that overlaps. And bugs of real systems."""

import copy
import gc
import io
import threading
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from harness.ledger import Ledger
from harness.memory import Memory
from harness.pictures import PARAMETERS
from harness.results import overlap
from harness.timeline import Recorder
from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import Awaited
from stage4_overlap.transport import GlooTransport, Transport
from tests.common import STAGES, add, batch, leave_late, loss_of, of_cpus, on_its_device

ADAMW = {"lr": 0.01, "weight_decay": 0.1, "fused": True}
ONE_PARAM = 1e-6  # a bucket_cap_mb at which each parameter is a bucket
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Branches(torch.nn.Module):
    """Six layers, called in any order: their gradients come in the reverse order, and no two of them are equal."""

    def __init__(self, seed, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7, dtype=dtype) for _ in range(6))

    def forward(self, x, order=range(6)):
        outputs = {i: torch.tanh(self.layers[i](x)) for i in order}
        return torch.stack([outputs[i] for i in sorted(order)]).sum(dim=0)


def params_of(model):
    return [param.detach().clone() for param in model.parameters()]


def equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def inputs(step, rank, dtype=torch.float32):
    return [tensor.to(rank.device, dtype) for tensor in batch(step, rank.rank)]


class Reference:
    """One process that has the data of all ranks: rounds what is sent to `dtype`, sums in fp32, steps fp32 copies."""

    def __init__(self, model, world_size):
        self.model, self.world_size = copy.deepcopy(model), world_size
        self.main_params = [param.detach().float() for param in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.main_params, **ADAMW)

    def step(self, rank, step, forward=lambda model, x, r: model(x)):
        params = list(self.model.parameters())
        total = [None] * len(params)
        for r in range(self.world_size):
            x, y = [tensor.to(rank.device, params[0].dtype) for tensor in batch(step, r)]
            loss = torch.nn.functional.mse_loss(forward(self.model, x, r), y)
            grads = torch.autograd.grad(loss, params, allow_unused=True)
            total = [add(t, None if g is None else (g / self.world_size).float()) for t, g in zip(total, grads)]
        for main_param, grad in zip(self.main_params, total):
            main_param.grad = grad
        self.optimizer.step()
        with torch.no_grad():
            for param, main_param in zip(params, self.main_params):
                param.copy_(main_param)


# ------------------------------------------------------------------------------------------------- order of gradients


def wait(module, grad_inputs, grad_outputs):
    """As a hook of a backward pass: this rank is late, and what its GPU has been told."""
    threading.Event().wait(0.02)
    if grad_outputs[0].is_cuda:
        torch.cuda._sleep(4 * 10**7)  # cycles: 20 ms


def orders(rank, pauses):
    """Each rank calls the layers in another order, and with `pauses` one rank after the other is late."""
    model = Branches(seed=0).to(rank.device)
    reference = Reference(model, rank.world_size)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    optimizer.prefetch_params(model)
    for i, layer in enumerate(model.layers):
        if pauses and i % rank.world_size == rank.rank:
            layer.register_full_backward_hook(wait)

    def order(r, step):
        return torch.randperm(6, generator=torch.Generator().manual_seed(100 * step + r)).tolist()
    for step in range(4):
        x, y = inputs(step, rank)
        torch.nn.functional.mse_loss(model(x, order(rank.rank, step)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(rank, step, lambda model, x, r: model(x, order(r, step)))
    optimizer.finish_param_sync()
    assert equal(params_of(model), params_of(reference.model))


@pytest.mark.parametrize("pauses", [False, True], ids=["", "one rank late"])
def test_the_order_in_which_gradients_come_differs_on_every_rank(run, pauses):
    run(orders, pauses)


# ------------------------------------------------------------------------------------- 16 bits on the wire, fp32 sums


def trained(rank, dtype, cap_mb, reduce_dtype=None):
    model = Branches(seed=rank.rank, dtype=DTYPES[dtype]).to(rank.device)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=cap_mb, reduce_dtype=reduce_dtype, **ADAMW)
    optimizer.prefetch_params(model)
    for step in range(4):
        loss_of(model, *inputs(step, rank, DTYPES[dtype])).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_param_sync()
    return params_of(model)


def caps(rank, dtype):
    """Parameters are to the bit those of one process, whatever the size of the buckets."""
    model = Branches(seed=0, dtype=DTYPES[dtype]).to(rank.device)
    reference = Reference(model, rank.world_size)
    for step in range(4):
        reference.step(rank, step)
    for cap_mb in (ONE_PARAM, 0.0002, None):
        for reduce_dtype in (None, torch.float32) if rank.backend == "gloo" else (torch.float32,):
            assert equal(trained(rank, dtype, cap_mb, reduce_dtype), params_of(reference.model)), (cap_mb, reduce_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_size_of_the_buckets(run, dtype):
    run(caps, dtype)


def natively(rank):
    """gloo's own reduce-scatter and all-gather stand for those of NCCL, which may add in any order."""
    for cap_mb in (ONE_PARAM, 0.0002, None):
        exchanged = trained(rank, "fp32", cap_mb, reduce_dtype=torch.float32)
        native_transport = mock.patch("stage4_overlap.optimizer.transport_for", lambda group, *_: Transport(group))
        with native_transport, Ledger() as ledger:
            native = trained(rank, "fp32", cap_mb)
        assert ledger.collectives["reduce_scatter"] == ledger.collectives["all_gather"]
        torch.testing.assert_close(native, exchanged, rtol=0, atol=0 if rank.world_size <= 2 else 1e-5)


def test_a_native_reduce_scatter_gives_what_an_exchange_gives(run):
    run(natively)


def counted(rank, dtype, n_rounds):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, dtype=DTYPES[dtype]) for _ in range(3))).to(rank.device)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=1, reduce_dtype=torch.float32, **ADAMW)
    with Ledger() as ledger:
        for _ in range(n_rounds):
            model(torch.ones(2, 1024, device=rank.device, dtype=DTYPES[dtype])).sum().backward()
        optimizer.step()
    d, sizes = rank.world_size, [bucket.flat_params.nbytes for bucket in optimizer.buckets]
    pieces = sum(-(-size // d // 2**20) for size in sizes)  # of all shards of a rank, at most 1 MiB each
    sent = pieces * (d - 1) * n_rounds
    flags = 4 * (2 * 6 + 2 + 2)  # used, what is wrong, rounds begun and finished, and the settings twice
    gathers = {"broadcast": d * pieces} if rank.backend == "gloo" else {"all_gather": len(sizes)}
    expected = {"send": sent, "recv": sent, "all_reduce": 1, **gathers}
    assert ledger.collectives == {kind: count for kind, count in expected.items() if count}
    assert sum(entry.size for entry in ledger.entries if entry.kind == "send") == sum(sizes) * (d - 1) // d * n_rounds
    assert ledger.wire_bytes == round((sum(sizes) * (1 + n_rounds) + 2 * flags) * (d - 1) / d)
    assert all(entry.completed_at >= entry.launched_at for entry in ledger.entries)
    assert {entry.dtype for entry in ledger.entries if entry.kind in ("send", *PARAMETERS)} <= {DTYPES[dtype]}
    return len(sizes)


@pytest.mark.parametrize("n_rounds", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_and_bytes_are_those_of_the_formula(run, dtype, n_rounds):
    """In 16 bits half of them: g and p are bytes of the parameters' dtype, d - 1 messages of at most 1 MB a bucket."""
    assert run(counted, dtype, n_rounds)[0] == 3  # buckets


# ----------------------------------------------------------------------------------------------------------- prefetch


def starts(rank, model, cap_mb=ONE_PARAM, x=None):
    """-> the optimizer of `model`, after a step whose parameters are still under way."""
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=cap_mb, **ADAMW)
    optimizer.prefetch_params(model)
    x = inputs(0, rank)[0] if x is None else x
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(bucket.param_sync is not None for bucket in optimizer.buckets)
    return optimizer, x


def own_buckets_only(rank):
    """What each layer finds when it is called: all before it have arrived, and what comes after is still under way."""
    model, under_way = Branches(seed=0).to(rank.device), []
    _, x = starts(rank, model)
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda *_: under_way.append([isinstance(other.weight, Awaited) for other in model.layers]))
    model(x)
    assert under_way == [[other > own for other in range(6)] for own in range(6)]


def test_a_module_waits_for_its_own_buckets_and_for_no_others(run):
    run(own_buckets_only)


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(5, 7), torch.nn.Linear(7, 5)

    def forward(self, x):
        return self.head(self.embed(x))


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
    "data": lambda model: [param.data.clone() for param in model.parameters()],
    "data_ptr": lambda model: [model.head.weight.data_ptr() * 0 + model.head.weight.data],
    "numpy": lambda model: [torch.tensor(model.head.bias.detach().cpu().numpy())],
    "item": lambda model: [torch.tensor(model.head.bias[0].item())],
    "parameters_to_vector": lambda model: [torch.nn.utils.parameters_to_vector(model.parameters())],
    "deepcopy": lambda model: params_of(copy.deepcopy(model)),
    "deepcopy of one": lambda model: [copy.deepcopy(model.head.weight)],
    "save": pickled,
    "AveragedModel": averaged,
    "torch.func": under_torch_func,
    "repr": lambda model: [torch.tensor([ord(letter) for letter in repr(model.head.bias)])],
}


class Listed(list):
    """A list of its own class, such as those of torch.fx."""


READS["foreach of a list of its own"] = lambda model: torch._foreach_add(Listed(model.parameters()), 1.0)
READS["cat of a list of its own"] = lambda model: [torch.cat(Listed([model.head.weight, model.embed.weight]))]


@on_its_device
def reads_past_hooks(rank, with_grad):
    model = Words()
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    optimizer.prefetch_params(model)
    if rank.rank == 0:
        leave_late(optimizer, 0.05)
    for how, read in READS.items():
        model(torch.arange(5)).square().mean().backward()
        optimizer.step()
        with torch.set_grad_enabled(with_grad and how != "in place"):
            model.zero_grad()
            assert [param.shape for param in model.parameters()] == [(5, 7), (5, 7), (5,)]
            assert not hasattr(model.head.weight, "to_local")  # many take what has it for a DTensor
            assert all(bucket.param_sync for bucket in optimizer.buckets), how  # all that needed no waiting
            first = read(model)
            optimizer.finish_param_sync()
            then = read(model)
        assert equal(first, then) and not any(isinstance(one, Awaited) for one in first), how
        assert [type(param) for param in model.parameters()] == [torch.nn.Parameter] * 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("with_grad", [True, False])
def test_whoever_reads_past_the_hooks_sees_finished_parameters(run, with_grad, world_size):
    run(reads_past_hooks, with_grad)


@on_its_device
def scripted(rank):
    """TorchScript reads past all that torch has for its functions to be watched."""
    model = Words()
    script = torch.jit.script(model)
    optimizer, _ = starts(rank, model, x=torch.arange(5))
    with pytest.raises(RuntimeError) as error:
        script(torch.arange(5)).sum().backward()
    optimizer.zero_grad()
    optimizer.finish_param_sync()
    script(torch.arange(5)).sum().backward()
    optimizer.step()
    return str(error.value)


def test_parameters_read_past_torch_functions_are_an_error(run):
    for message in run(scripted):
        assert "finish_param_sync()" in message and "parameter 2 " in message  # the optimizer was given no names


@on_its_device
def script_prefetched(rank):
    """Without prefetch `step` waits, and a TorchScript model is one like any other."""
    model = torch.nn.Sequential(Words(), torch.jit.script(torch.nn.Linear(5, 5)))
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    with pytest.raises(TypeError, match="module 1 is of TorchScript"):
        optimizer.prefetch_params(model)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    assert all(bucket.param_sync is None for bucket in optimizer.buckets)


def test_a_torchscript_model_is_not_prefetched(run):
    run(script_prefetched)


@on_its_device
def script_afterwards(rank):
    model = Words()
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    handles = optimizer.prefetch_params(model)
    assert optimizer.prefetch_params(model) == []  # each module has its hook
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    expected = model(torch.arange(5))
    for handle in handles:
        handle.remove()
    assert torch.equal(torch.jit.script(model)(torch.arange(5)), expected)


def test_without_the_hooks_a_model_can_become_a_torchscript_model(run):
    run(script_afterwards)


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


def containers(rank):
    """-> names of the parameters that are still under way when the model is called; is what it computes right?"""
    model, under_way = Experts().to(rank.device), []
    optimizer, x = starts(rank, model)
    look = model.register_forward_pre_hook(lambda *_: under_way.extend(
        name for name, param in model.named_parameters() if isinstance(param, Awaited)))
    with torch.no_grad():
        first = model(x)
        look.remove()
        optimizer.finish_param_sync()
        return under_way, torch.equal(first, model(x))


@pytest.mark.parametrize("world_size", [2])
def test_a_module_waits_for_the_containers_in_it(run, world_size):
    for under_way, right in run(containers):
        assert under_way == ["more.1.weight", "more.1.bias"] and right


def versions(rank):
    """They move on before the parameters leave: a graph that has read the old ones is refused, whoever has made it."""
    model = Branches(seed=0).to(rank.device)
    optimizer, x = starts(rank, model)
    optimizer.finish_param_sync()
    before = [param._version for param in model.parameters()]
    model(x).sum().backward()
    optimizer.step()
    with torch._C.DisableTorchFunctionSubclass():
        under_way = [param._version for param in model.parameters()]
        awaited = [isinstance(param, Awaited) for param in model.parameters()]
    optimizer.finish_param_sync()
    arrived = [param._version for param in model.parameters()]
    return all(awaited) and all(old < new for old, new in zip(before, under_way)) and arrived == under_way


def test_parameters_are_new_before_anybody_may_read_them(run):
    assert all(run(versions))


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


def prefetched(rank, how, compiled):
    model = Odd(how).to(rank.device)
    reference = Reference(model, rank.world_size)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    optimizer.prefetch_params(model)
    reference.model.how = None  # torch.autograd.grad can't go through reentrant checkpointing
    forward = torch.compile(model, backend="eager") if compiled else model
    for step in range(3):
        x, y = inputs(step, rank)
        loss_of(forward, x.requires_grad_(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(rank, step, lambda model, x, r: model(x.requires_grad_()))
        assert any(bucket.param_sync is not None for bucket in optimizer.buckets)
        if step == 1:
            model.eval()
            with torch.no_grad():
                assert torch.equal(forward(x), reference.model(x))
            model.train()
    optimizer.finish_param_sync()
    for param, expected in zip(model.parameters(), reference.model.parameters()):
        # Reentrant: the two gradients of the layer that is called twice are added one by one.
        assert torch.equal(param, expected) if how != "reentrant" else torch.allclose(param, expected, atol=1e-5)


@pytest.mark.parametrize("how", [None, "reentrant", "non-reentrant"])
def test_prefetch_under_checkpointing_out_of_order_and_twice(run, how):
    run(prefetched, how, compiled=False)


@pytest.mark.parametrize("world_size", [2])
def test_prefetch_in_a_compiled_model(run, world_size):
    run(prefetched, None, compiled=True)


def beside_messages(rank):
    """Messages of the user's with many tags, that of a step say, and of the size of a piece of gradients."""
    model = Branches(seed=0).to(rank.device)
    reference = Reference(model, rank.world_size)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    tags, numel = range(990, 1400), optimizer.buckets[0].shards.shape[1]
    theirs = [torch.zeros(numel, device=rank.device) for _ in tags]
    for step in range(3):
        sent = [torch.full((numel,), 7.0, device=rank.device) for _ in tags]
        works = [dist.isend(tensor, 0, tag=tag) for tensor, tag in zip(sent, tags)] if rank.rank else []
        loss_of(model, *inputs(step, rank)).backward()
        works = works or [dist.irecv(tensor, 1, tag=tag) for tensor, tag in zip(theirs, tags)]
        optimizer.step()
        optimizer.zero_grad()
        for work in works:
            work.wait()
        assert all(tensor.eq(7).all() for tensor in theirs) or rank.rank
        reference.step(rank, step)
    assert equal(params_of(model), params_of(reference.model))


@pytest.mark.parametrize("world_size", [2])
def test_gradients_keep_out_of_other_messages(run, world_size):
    run(beside_messages)


def one_more_on_rank_0(rank):
    """Rank 0 has an optimizer in a group of its own, too: what all of them share has the same tags nevertheless."""
    alone = dist.new_group([0])
    if rank.rank == 0:
        DistributedOptimizer(Branches(seed=1).to(rank.device).parameters(), process_group=alone, **ADAMW)
    model = Branches(seed=0).to(rank.device)
    reference = Reference(model, rank.world_size)
    optimizer = DistributedOptimizer(model.parameters(), **ADAMW)
    loss_of(model, *inputs(0, rank)).backward()
    optimizer.step()
    reference.step(rank, 0)
    assert equal(params_of(model), params_of(reference.model))


@pytest.mark.parametrize("world_size", [2])
def test_messages_of_one_group_do_not_depend_on_others(run, world_size):
    run(one_more_on_rank_0)


def halved_by_hooks(rank, cap_mb):
    """A hook of the user's on each parameter, later than the optimizer's, changes what is averaged."""
    model = Branches(seed=0).to(rank.device)
    optimizer = DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, bucket_cap_mb=cap_mb)
    optimizer.prefetch_params(model)
    before = params_of(model)

    def halve(param):
        param.grad.mul_(0.5)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(halve)
    x = torch.ones(2, 7, device=rank.device)
    grads = torch.autograd.grad(model(x).sum(), model.parameters())
    model(x).sum().backward()
    optimizer.step()
    for old, param, grad in zip(before, params_of(model), grads):
        torch.testing.assert_close(old - param, grad / 2)


@pytest.mark.parametrize("cap_mb", [ONE_PARAM, 1])
def test_a_gradient_leaves_after_all_hooks_of_its_parameter(run, world_size, cap_mb):
    run(halved_by_hooks, cap_mb)


def hooks_of_a_weight_used_twice(rank):
    """In re-entrant checkpoints, each a backward pass of its own: its gradient comes twice, and no other in between."""
    weight, bias = (torch.nn.Parameter(torch.full((4,), 0.5, device=rank.device)) for _ in range(2))
    optimizer = DistributedOptimizer([bias, weight], torch.optim.SGD, lr=1.0, bucket_cap_mb=ONE_PARAM)
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


@pytest.mark.parametrize("world_size", [2])
def test_a_gradient_that_comes_twice_leaves_after_both_hooks(run, world_size):
    run(hooks_of_a_weight_used_twice)


def with_another_head(rank):
    """-> whether the head of before is gone."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(rank.device)
    DistributedOptimizer(model.parameters()).prefetch_params(model)
    old = weakref.ref(model[1].weight)
    model[1] = torch.nn.Linear(4, 2).to(rank.device)
    DistributedOptimizer(model.parameters()).prefetch_params(model)
    gc.collect()
    return old() is None


def test_a_layer_that_was_replaced_is_not_kept(run):
    assert all(run(with_another_head))


def compiled_with_its_step(rank):
    model = Branches(seed=0).to(rank.device)
    reference = Reference(model, rank.world_size)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    optimizer.prefetch_params(model)

    @torch.compile(backend="eager")
    def train(x, y):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        train(*inputs(step, rank))
        reference.step(rank, step)
    optimizer.finish_param_sync()
    assert equal(params_of(model), params_of(reference.model))


@pytest.mark.parametrize("world_size", [2])
def test_a_compiled_function_may_go_backward_and_step(run, world_size):
    run(compiled_with_its_step)


def evaluated_encoder(rank, whole):
    """In eval torch's encoder asks the parameters of its first layer, which it doesn't call, for their class."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 2).to(rank.device)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    optimizer.prefetch_params(model)
    model(torch.linspace(0, 1, 24, device=rank.device).view(1, 3, 8)).square().mean().backward()
    optimizer.step()
    padding = torch.tensor([[False, False, True]], device=rank.device)
    (model if whole else model.layers).eval()
    with torch.no_grad():
        first, second = (model(torch.ones(1, 3, 8, device=rank.device), src_key_padding_mask=padding) for _ in range(2))
    assert torch.equal(first, second)
    model.train()
    model(torch.ones(1, 3, 8, device=rank.device)).square().mean().backward()
    optimizer.step()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append(optimizer.buckets[0].param_sync is not None))
    model(torch.ones(1, 3, 8, device=rank.device))
    assert seen == [True]  # in training each layer waits for its own


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("whole", [True, False], ids=["encoder", "its layers"])
def test_an_encoder_is_evaluated_after_a_step_as_at_any_time(run, whole, world_size):
    run(evaluated_encoder, whole)


def compiled_once(rank):
    """torch's attention reads parameters of a module that it doesn't call, and a guard looks at their class."""
    model, graphs, seen = Odd(None).to(rank.device), [], []
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    optimizer.prefetch_params(model)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    forward = torch.compile(model, backend=backend)
    for step in range(6):
        x, y = inputs(step, rank)
        loss_of(forward, x.requires_grad_(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(len(graphs))
    optimizer.finish_param_sync()
    assert seen[-1] == seen[2], seen


@pytest.mark.parametrize("world_size", [2])
def test_a_compiled_model_is_not_compiled_anew_in_each_step(run, world_size):
    run(compiled_once)


def loads(rank):
    """What is loaded right after a step stays: no parameter arrives on top of it."""
    model, other = Branches(seed=0).to(rank.device), Branches(seed=5).to(rank.device)
    optimizer, x = starts(rank, model)
    model.load_state_dict(other.state_dict())
    optimizer.finish_param_sync()
    assert equal(params_of(model), params_of(other))


def test_weights_that_are_loaded_right_after_a_step_stay(run):
    run(loads)


def sees_finished_params(rank, how):
    model = Branches(seed=0).to(rank.device)
    optimizer, x = starts(rank, model)
    if how == "state_dict":
        seen = [value.clone() for value in model.state_dict().values()]
    elif how == "state_dict of a child":
        model.layers[3].state_dict()
        seen = params_of(model)
    elif how == "finish_param_sync":
        optimizer.finish_param_sync()
        seen = params_of(copy.deepcopy(model))
    elif how == "eval that reads a weight of another module":
        with torch.no_grad():
            model.eval()(x, [0])  # the other layers are read without being called
            seen = params_of(model)
    else:
        for layer in model.layers[:3]:
            layer.requires_grad_(False)
        model(x).sum().backward()
        seen = params_of(model)
    optimizer.finish_param_sync()
    assert equal(seen, params_of(model))
    others = [torch.empty_like(value) for value in seen]
    for value, other in zip(seen, others):
        dist.broadcast(other.copy_(value), src=0)
    assert equal(seen, others)  # on every rank


READERS = ["state_dict", "state_dict of a child", "finish_param_sync", "eval that reads a weight of another module",
           "requires_grad"]


@pytest.mark.parametrize("how", READERS)
def test_whoever_reads_sees_finished_parameters(run, how):
    run(sees_finished_params, how)


# -------------------------------------------------------------------------------------------------- unused parameters


USES = {
    "one on no rank": lambda rank, step: [0, 1, 2, 4, 5],
    "another one on each rank": lambda rank, step: [i for i in range(6) if i != rank],
    "others in each step": lambda rank, step: [i for i in range(6) if i not in ((step + rank) % 6, 3 + step % 3)],
    "one in the first step only": lambda rank, step: [0, 1, 3, 4, 5] if step else range(6),
}


def unused_like_ddp(rank, uses):
    torch.manual_seed(0)
    model, other = Branches(seed=0).to(rank.device), Branches(seed=0).to(rank.device)
    ddp = DistributedDataParallel(other, find_unused_parameters=True)
    plain = torch.optim.AdamW(other.parameters(), **ADAMW)
    optimizer = DistributedOptimizer(
        model.parameters(), bucket_cap_mb=ONE_PARAM, find_unused_parameters=True, **ADAMW
    )
    optimizer.prefetch_params(model)
    for step in range(5):
        x, y = inputs(step, rank)
        for one, its_optimizer in ((ddp, plain), (model, optimizer)):
            torch.nn.functional.mse_loss(one(x, USES[uses](rank.rank, step)), y).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    optimizer.finish_param_sync()
    for param, expected in zip(model.parameters(), other.parameters()):
        assert torch.equal(param, expected) if rank.world_size <= 2 else torch.allclose(param, expected, atol=1e-5)


@pytest.mark.parametrize("uses", USES)
def test_unused_parameters_like_ddp(run, uses):
    run(unused_like_ddp, uses)


def old_gradients(rank):
    """SGD by hand: in the second step only the last rank uses all layers, what the others sent before is gone."""
    params = [torch.nn.Parameter(torch.zeros(5, device=rank.device)) for _ in range(3)]
    optimizer = DistributedOptimizer(params, torch.optim.SGD, lr=1.0, bucket_cap_mb=ONE_PARAM,
                                     find_unused_parameters=True)
    is_last = rank.rank == rank.world_size - 1
    for used in (params, params if is_last else params[:1], params[1:]):
        sum(param.sum() for param in used).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = torch.tensor([-2.0, *[-2 - 1 / rank.world_size] * 2], device=rank.device)
    assert torch.allclose(torch.stack(list(params)), moved[:, None].expand(3, 5))


def test_the_old_gradient_of_an_unused_parameter_is_not_added_again(run):
    run(old_gradients)


def frozen_on_one_rank(rank):
    """SGD by hand: the last rank has frozen a layer, and asks for no gradient; those of the others count."""
    params = [torch.nn.Parameter(torch.zeros(5, device=rank.device)) for _ in range(3)]
    optimizer = DistributedOptimizer(params, torch.optim.SGD, lr=1.0, bucket_cap_mb=ONE_PARAM)
    params[1].requires_grad_(rank.rank != rank.world_size - 1)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    used_by = (rank.world_size - 1) / rank.world_size
    assert torch.allclose(torch.stack([*params]), torch.tensor([[-1.0], [-used_by], [-1.0]], device=rank.device))
    (params[0] + params[2]).sum().backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_rank_has_frozen_is_asked_of_the_others(run, world_size):
    assert all("no gradient on some rank for parameter 1 of group 0:" in message for message in run(frozen_on_one_rank))


# ------------------------------------------------------------------------------------------------------------- memory


def bounded(rank):
    """At most two buckets travel, and a gradient is gone from its parameter when its bucket has left."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12))).to(rank.device)
    model[-2].bias.requires_grad_(False)  # no bucket waits for that of a frozen one
    most, kept = [], []

    def look(_):
        most.append(len(optimizer.travelling))
        kept.append(sum(param.grad is not None for param in model.parameters()))
    for param in filter(lambda param: param.requires_grad, model.parameters()):
        param.register_post_accumulate_grad_hook(look)  # before the optimizer's: for later ones a gradient would wait
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=0.015, **ADAMW)
    model(torch.ones(1, 64, device=rank.device)).sum().backward()
    assert max(most) == 2 and max(kept) <= 4  # a layer, two parameters, is a bucket
    assert not any(param.grad is not None for param in model.parameters())
    assert len(optimizer.buckets) >= 12
    optimizer.step()
    largest = max(bucket.flat_params.nbytes for bucket in optimizer.buckets)
    assert optimizer.bucket_buffer_bytes <= 2 * 2 * largest


def test_two_buckets_travel_and_gradients_are_released(run):
    run(bounded)


FORMULAS = {"fp32": lambda d: 4 + 12 / d, "bf16": lambda d: 2 + 16 / d, "fp16": lambda d: 2 + 16 / d}


@pytest.mark.parametrize("d", [1, 2, 4, 8, 64, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_a_parameter_are_those_of_the_formula(dtype, d):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=d)
    try:
        with Memory("cpu") as memory:
            model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, dtype=DTYPES[dtype]) for _ in range(4)))
            optimizer = DistributedOptimizer(model.parameters(), **ADAMW)
            for _ in range(2):
                model(torch.ones(1, 2048, dtype=DTYPES[dtype])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            counted = memory.live - optimizer.bucket_buffer_bytes
        numel = sum(param.numel() for param in model.parameters())
        assert counted / numel == pytest.approx(FORMULAS[dtype](d), rel=0.01)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------- overlap, as the events tell it


class Pause(torch.autograd.Function):
    """Lets the backward pass wait for `arrived`, a function, for 20 seconds at most."""

    @staticmethod
    def forward(ctx, x, arrived):
        ctx.arrived = arrived
        return x + 0.0

    @staticmethod
    def backward(ctx, grad):
        for _ in range(2000):
            if ctx.arrived():
                break
            threading.Event().wait(0.01)
        return grad + 0.0, None


class Paused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)

    def forward(self, x, arrived):
        return self.last(Pause.apply(self.first(x), arrived))


def events(rank, prefetch):
    rank, group = of_cpus(rank)
    model = Paused()
    optimizer = DistributedOptimizer(model.parameters(), process_group=group, bucket_cap_mb=0.1, **ADAMW)
    if prefetch:
        optimizer.prefetch_params(model)
    x = torch.ones(2, 300)

    def arrived():
        """One bucket, of all other ranks."""
        return sum(e.kind == "recv" and e.completed_at is not None for e in recorder.entries) >= rank.world_size - 1

    with Memory(rank.device) as memory, Recorder(memory) as recorder:
        for _ in range(2):
            with recorder.phase("forward"):
                loss = model(x, arrived).sum()
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("step"):
                optimizer.step()
                optimizer.zero_grad()
        optimizer.finish_param_sync()
    first = {name: (start, end) for name, start, end in reversed(recorder.phases)}
    forward_2 = recorder.phases[3][1:]
    start, end = first["backward"][0], first["step"][1]
    received = [e for e in recorder.entries if e.kind == "recv" and start < e.launched_at < end]
    gathered = [e for e in recorder.entries if e.kind == "broadcast" and e.launched_at < forward_2[0]]
    assert len(optimizer.buckets) == 2 and len(gathered) == 2 * rank.world_size
    assert overlap(recorder.busy, [first["backward"]])  # operators of backward are seen
    in_backward = [first["backward"][0] < e.launched_at and e.completed_at < first["backward"][1] for e in received]
    in_forward = [e.completed_at > forward_2[0] for e in gathered]
    return in_backward, in_forward


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_reduce_scatter_lies_inside_backward(run, world_size):
    """That of the last layer leaves before the pause and arrives in it; that of the first leaves when backward ends."""
    for in_backward, _ in run(events, prefetch=True):
        assert sum(in_backward) >= len(in_backward) // 2 > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_prefetch_step_waits_for_the_parameters(run, world_size):
    for _, in_forward in run(events, prefetch=False):
        assert not any(in_forward)


def all_gather_is_late(rank):
    """Rank 0 starts its all-gathers when it has heard from the others that they are in the next forward."""
    rank, group = of_cpus(rank)
    model = Branches(seed=0)
    optimizer = DistributedOptimizer(model.parameters(), process_group=group, bucket_cap_mb=ONE_PARAM, **ADAMW)
    optimizer.prefetch_params(model)
    x, _ = inputs(0, rank)
    model(x).sum().backward()
    unheard = list(range(1, rank.world_size)) if rank.rank == 0 else []
    word = torch.ones(1)
    optimizer.optimizer.register_step_post_hook(lambda *_: [dist.recv(word, unheard.pop(), group) for _ in unheard[:]])
    with Memory(rank.device) as memory, Recorder(memory) as recorder:
        optimizer.step()
        with recorder.phase("forward"):
            if rank.rank:
                dist.send(word, 0, group)
            model(x)
    (_, start, end), = recorder.phases
    d, ends = rank.world_size, [e.completed_at for e in recorder.entries if e.kind == "broadcast"]
    return sum(start < max(ends[i : i + d]) < end for i in range(0, len(ends), d))  # of d broadcasts each


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gathers_lie_inside_the_next_forward(run, world_size):
    assert all(n >= 10 for n in run(all_gather_is_late)[1:])  # of 12


def steps_between_arrivals(rank, clip):
    model = Branches(seed=0).to(rank.device)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    model(inputs(0, rank)[0]).sum().backward()
    log = []
    for buffer in [*optimizer.idle, *optimizer.travelling]:
        finish = buffer.finish_grad_sync
        buffer.finish_grad_sync = lambda finish=finish: (log.append("arrival"), finish())
    optimizer.optimizer.register_step_post_hook(lambda *_: log.append("step"))
    if clip:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return log


@pytest.mark.parametrize("clip", [False, True])
def test_the_inner_optimizer_steps_once_when_all_have_arrived(run, clip):
    for log in run(steps_between_arrivals, clip):
        assert log == ["arrival", "arrival", "step"]


# ------------------------------------------------------------------------------------------------------------- device


def test_the_native_reduce_scatter_where_it_is_one():
    """Everywhere but on gloo: one operator a bucket, straight into the shard."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        model = Branches(seed=0)
        optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
        with Ledger() as ledger:
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        assert ledger.collectives == {"reduce_scatter": 12, "all_reduce": 1, "all_gather": 12}
        for _, sent, received in optimizer.idle[0].places.values():
            (own,) = optimizer.idle[0].transport.parts(sent, received)
            assert own.data_ptr() == sent.data_ptr() + own.nbytes  # in place, where NCCL wants it: at this rank's part
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_an_optimizer_does_not_keep_a_group_that_is_destroyed(reduce_dtype):
    """gloo's threads would end with the interpreter then, and abort it now and then."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        group, model = weakref.ref(dist.group.WORLD), Branches(seed=0)
        optimizer = DistributedOptimizer(model.parameters(), reduce_dtype=reduce_dtype, **ADAMW)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert group() is None


def living_works(rank):
    """-> how many works of all-gathers somebody holds after each of two steps."""
    model = Branches(seed=0).to(rank.device)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **ADAMW)
    start, works, n_living = GlooTransport.all_gather, [], []

    def watched(transport, shards):
        started = start(transport, shards)
        works.extend(map(weakref.ref, started))
        return started
    with mock.patch.object(GlooTransport, "all_gather", watched):
        for step in range(2):
            model(inputs(step, rank)[0]).sum().backward()
            optimizer.step()
            n_living.append(sum(work() is not None for work in works))
    return n_living, len(works)


def test_works_that_are_done_stay_until_the_next(run):
    """Were gloo's thread the last to hold one, it would need the GIL, and abort where Python ends: 6 runs of 30 did."""
    for n_living, n_works in run(living_works):
        assert n_living == [n_works // 2] * 2 and n_works >= 24


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_waits_for_the_whole_device(stage):
    folder = Path(__file__).resolve().parents[2] / stage
    assert not any("synchronize(" in path.read_text() for path in folder.glob("*.py"))
