"""What people do to the model while an optimizer has it: build another optimizer, freeze, load, move, copy, read oddly.

Each is what replicated training makes of it, or an error that says what to do: on every rank, and never silence.
"""

import collections
import contextlib
import copy
import gc
import io
import itertools
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkpoint import full_state_dict
from harness.measure.ledger import Ledger
from stage4_overlap import DistributedOptimizer
from tests.common import STAGES, batch, leave_late, optimizer_of
from tests.stages.test_hostile import error_of

SGD = {"optimizer_cls": torch.optim.SGD, "lr": 0.1}
ONE_PARAM = 1e-6  # a bucket_cap_mb at which each parameter is a bucket
FOUR = STAGES[3]


def net(rank, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]
    return torch.nn.Sequential(*layers).to(rank.device, dtype)


def loss(model, rank, step=0):
    x, _ = batch(step, rank.rank)
    return model(x.to(rank.device, next(model.parameters()).dtype)).square().mean()


def with_ddp(rank, model):
    """-> the same under DDP, what is called to train it, and its optimizer."""
    other = copy.deepcopy(model)
    return other, DistributedDataParallel(other), torch.optim.SGD(other.parameters(), lr=0.1)


def step_both(rank, step, *both):
    """A step of each (model, optimizer), with the same batch."""
    for one, optimizer in both:
        loss(one, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(model, other, world_size):
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=1e-6 if world_size > 1 else 0)


# -------------------------------------------------------------------------------------------------- a second optimizer


def again(rank, stage, is_dropped):
    """Three optimizers, one after the other, over the same parameters."""
    model = net(rank)
    other, ddp, plain = with_ddp(rank, model)
    kept = []
    for turn in range(3):
        optimizer = optimizer_of(stage)(model.parameters(), **SGD)
        if stage == FOUR:  # parameters that are still under way would arrive on top of the new ones
            assert all(bucket.param_sync is None for one in kept for bucket in one.buckets)
        kept += [] if is_dropped else [optimizer]
        if stage == FOUR:
            optimizer.prefetch_params(model)
            if rank.rank == 0:
                leave_late(optimizer)
        for step in range(2):
            step_both(rank, 2 * turn + step, (model, optimizer), (ddp, plain))
    if stage == FOUR:
        optimizer.finish_param_sync()
    assert_same(model, other, rank.world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_dropped", [True, False])
def test_another_optimizer_over_the_same_parameters(run, stage, world_size, is_dropped):
    run(again, stage, is_dropped)


def dropped(rank, stage):
    """The optimizer goes while the model lives, and then the model, which has a hook of its."""
    model = net(rank)
    optimizer = optimizer_of(stage)(model.parameters(), **SGD)
    if stage == FOUR:
        optimizer.prefetch_params(model)
    loss(model, rank).backward()
    optimizer.step()
    gone, gone_model = weakref.ref(optimizer), weakref.ref(model[0].weight)
    del optimizer
    gc.collect()
    assert gone() is None
    loss(model, rank).backward()
    del model
    gc.collect()
    return gone_model() is None


def hooks_left(rank, stage):
    """One after the other over the same parameters, as in a search for a learning rate."""
    weight = torch.nn.Parameter(torch.ones(8, device=rank.device))
    for _ in range(5):
        optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=0.5)
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(weight._post_accumulate_grad_hooks)


ROOT = Path(__file__).resolve().parents[2]
PLAIN_SCRIPT = """
import torch
import torch.distributed as dist
from stage1_naive_broadcast import DistributedOptimizer
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
optimizer = DistributedOptimizer(model.parameters())
def globals_that_live_until_python_ends():
    return model, optimizer
dist.destroy_process_group()
"""


def test_python_ends_without_a_word():
    """Every stage registers its hooks in the same way."""
    run = subprocess.run([sys.executable, "-c", PLAIN_SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


@pytest.mark.parametrize("world_size", [2])
def test_an_optimizer_that_is_gone_leaves_no_hook(run, stage, world_size):
    assert run(hooks_left, stage) == [1, 1]


def test_what_nobody_has_any_more_is_freed(run, stage):
    assert all(run(dropped, stage))


def dropped_again_and_again(rank):
    """What they had under way stays, and nothing else of them."""
    for _ in range(3):
        model = net(rank)
        optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **SGD)
        loss(model, rank).backward()
        buckets = [weakref.ref(bucket) for bucket in optimizer.buckets]
        del optimizer, model
        threading.Event().wait(0.1)  # on a GPU a thread of autograd's may have the backward pass for a moment more
        gc.collect()
        assert not any(bucket() for bucket in buckets)


def test_optimizers_that_are_dropped_in_a_step_leave_their_model_to_go(run):
    run(dropped_again_and_again)


def prefetched_twice(rank):
    model = net(rank)
    for _ in range(3):
        optimizer = DistributedOptimizer(model.parameters(), **SGD)
        optimizer.prefetch_params(model)
    return len(model[0]._forward_pre_hooks)


@pytest.mark.parametrize("world_size", [1])
def test_each_module_has_one_hook_that_waits(run, world_size):
    assert run(prefetched_twice) == [1]


def dropped_in_backward(rank):
    """Its messages arrive all the same: those of the next optimizer would be taken for them."""
    model = net(rank)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **SGD)
    loss(model, rank).backward()
    assert optimizer.travelling or rank.world_size == 1
    del optimizer, model
    gc.collect()
    model = net(rank, seed=1)
    other, ddp, plain = with_ddp(rank, model)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **SGD)
    for one, its_optimizer in ((model, optimizer), (ddp, plain)):
        loss(one, rank, step=1).backward()
        its_optimizer.step()
    assert_same(model, other, rank.world_size)


def test_an_optimizer_that_is_dropped_while_gradients_travel(run):
    run(dropped_in_backward)


# ------------------------------------------------------------------------------------------- freezing, loading, moving


def unfrozen(rank, stage):
    """A layer that was frozen when the optimizer was made: two micro-batches, without no_sync."""
    model = net(rank)
    model[0].requires_grad_(False)
    small_buckets = {"bucket_cap_mb": ONE_PARAM} if stage == FOUR else {}
    optimizer = optimizer_of(stage)(model.parameters(), **SGD, **small_buckets)
    model[0].requires_grad_(True)
    other, ddp, plain = with_ddp(rank, model)
    for step in range(2):
        for one, its_optimizer in ((model, optimizer), (ddp, plain)):
            for micro in range(2):
                loss(one, rank, 2 * step + micro).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert_same(model, other, rank.world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_layer_that_is_unfrozen_later(run, stage, world_size):
    run(unfrozen, stage)


def unfrozen_after_a_step(rank, stage):
    """torch's fused SGD refuses parameters some of which have momentum already: here a layer comes a step later."""
    model = net(rank)
    other = copy.deepcopy(model)
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    optimizer = optimizer_of(stage)(model.parameters(), **SGD, momentum=0.9)
    for step in range(3):
        model[0].requires_grad_(step > 0)
        other[0].requires_grad_(step > 0)
        loss(model, rank, step).backward()
        for r in range(rank.world_size):
            (loss(other, SimpleNamespace(rank=r, device=rank.device), step) / rank.world_size).backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    assert_same(model, other, rank.world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_layer_that_is_unfrozen_when_the_others_have_momentum(run, stage, world_size):
    run(unfrozen_after_a_step, stage)


def frozen_after_backward(rank, stage):
    model = net(rank)
    other, ddp, plain = with_ddp(rank, model)
    optimizer = optimizer_of(stage)(model.parameters(), **SGD)
    for one, layers, its_optimizer in ((model, model, optimizer), (ddp, other, plain)):
        loss(one, rank).backward()
        layers[0].requires_grad_(False)
        its_optimizer.step()
    assert_same(model, other, rank.world_size)


@pytest.mark.parametrize("world_size", [2])
def test_a_gradient_counts_if_its_parameter_is_frozen_afterwards(run, stage, world_size):
    run(frozen_after_backward, stage)


def frozen_elsewhere(rank, stage):
    """SGD by hand: each rank freezes another layer, of the same shape; then one rank freezes all of them."""
    params = [torch.nn.Parameter(torch.zeros(5, device=rank.device)) for _ in range(3)]
    optimizer = optimizer_of(stage)(params, torch.optim.SGD, lr=1.0)
    params[rank.rank].requires_grad_(False)
    sum(factor * param.sum() for factor, param in zip((1, 2, 3), params)).backward()
    optimizer.step()
    assert [param.tolist() for param in params] == [[-0.5] * 5, [-1.0] * 5, [-3.0] * 5]
    optimizer.zero_grad()
    for param in params:
        param.requires_grad_(rank.rank == 0)
    if rank.rank == 0:
        sum(param.sum() for param in params).backward()
    optimizer.step()
    assert [param.tolist() for param in params] == [[-1.0] * 5, [-1.5] * 5, [-3.5] * 5]


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", [*STAGES[:2], FOUR])
def test_layers_that_are_frozen_on_some_ranks(run, stage, world_size):
    run(frozen_elsewhere, stage)


def large_in_16_bits(rank, stage):
    """The sum of two gradients is more than fp16 can hold, their mean is not: DDP divides first."""
    param = torch.nn.Parameter(torch.zeros(5, device=rank.device, dtype=torch.float16))
    optimizer = optimizer_of(stage)([param], torch.optim.SGD, lr=1e-3)
    (param * 40000).sum().backward()
    optimizer.step()
    assert param.tolist() == pytest.approx([-40.0] * 5, rel=1e-3)  # stages 1 and 2 step it in 16 bits


@pytest.mark.parametrize("world_size", [2])
def test_gradients_are_divided_before_they_are_added(run, stage, world_size):
    run(large_in_16_bits, stage)


def forgotten(rank, stage):
    """A new dict in place of the state: momentum begins anew, as in torch."""
    param = torch.nn.Parameter(torch.zeros(5, device=rank.device))
    optimizer = optimizer_of(stage)([param], torch.optim.SGD, lr=1.0, momentum=0.9)
    for _ in range(2):
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state = collections.defaultdict(dict)
    assert param.tolist() == [-2.0] * 5 and not optimizer.state


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_is_replaced(run, stage, world_size):
    run(forgotten, stage)


def shared_with_processes(rank, stage, when):
    """A model in shared memory stays there, for processes that read it. In stage 4 it can't be moved there later."""
    model = net(rank)
    other, ddp, plain = with_ddp(rank, model)
    if when == "before":
        model.share_memory()
    optimizer = optimizer_of(stage)(model.parameters(), **SGD)
    for step in range(2):
        step_both(rank, step, (model, optimizer), (ddp, plain))
        if when == "after":
            model.share_memory()
            if stage == FOUR:
                with pytest.raises(RuntimeError, match=r"data of parameter .* was replaced, by .*share_memory\(\)"):
                    step_both(rank, step, (model, optimizer))
                return
    assert all(param.is_shared() for param in model.parameters())
    assert_same(model, other, rank.world_size)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_in_shared_memory(run, stage, world_size, when, request):
    if not request.config.getoption("--gpu"):  # a GPU's memory is shared always
        run(shared_with_processes, stage, when)


def storages(rank, stage, prefetch, dtype):
    """Whoever saves or copies one tensor gets that tensor. Of 16 bits too, of no elements, and while on the way."""
    model = net(rank, dtype=dtype)
    model.append(torch.nn.Linear(0, 3, device=rank.device, dtype=dtype))
    optimizer = optimizer_of(stage)(list(model[:5].parameters()) + [model[5].weight], torch.optim.AdamW, lr=0.1,
                                    **({"find_unused_parameters": True} if stage == FOUR else {}))
    if prefetch:
        optimizer.prefetch_params(model)
    for step in range(2):
        loss(model[:5], rank, step).backward()
        optimizer.step()
        named = dict(model.named_parameters())
        assert {name: param.untyped_storage().nbytes() for name, param in named.items()} == {
            name: param.nbytes for name, param in named.items()}
        assert len({param.untyped_storage().data_ptr() for param in named.values() if param.numel()}) == 7
        assert all(len(pickle.dumps(param.detach())) < param.nbytes + 1000 for param in named.values())
        assert copy.deepcopy(model[0].weight).untyped_storage().nbytes() == model[0].weight.nbytes
    values = [param.detach().clone() for param in model.parameters()]
    del optimizer
    gc.collect()
    torch.full((1000,), torch.nan, device=rank.device)  # in memory that was freed, if it was
    assert all(map(torch.equal, model.parameters(), values))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage, prefetch", [*((stage, False) for stage in STAGES[1:]), (FOUR, True)])
def test_each_parameter_has_a_storage_of_its_own(run, stage, world_size, prefetch, dtype):
    run(storages, stage, prefetch, dtype)


def with_graph(rank, stage):
    model = net(rank)
    other, ddp, plain = with_ddp(rank, model)
    optimizer = optimizer_of(stage)(model.parameters(), **SGD)
    for step in range(2):
        for one, its_optimizer in ((model, optimizer), (ddp, plain)):
            loss(one, rank, step).backward(create_graph=one is model)
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert_same(model, other, rank.world_size)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_have_a_graph(run, stage, world_size):
    run(with_graph, stage)


def loaded(rank, stage, dtype):
    """With a learning rate of 0, what is loaded stays to the bit; what is not touched keeps its fp32 part."""
    model, other = net(rank, dtype=dtype), net(rank, seed=5, dtype=dtype)
    optimizer = optimizer_of(stage)(model.parameters(), torch.optim.SGD, lr=1e-4, momentum=0.9)
    for _ in range(3):  # steps too small for 16 bits: only the fp32 parts move
        model[4].bias.grad = torch.ones_like(model[4].bias)
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
        optimizer.zero_grad()
    main_before = main_of(optimizer, model[4].bias)
    model[0].load_state_dict(other[0].state_dict())
    with torch.no_grad():
        model[4].bias.copy_(model[4].bias.clone())  # written, and not changed
    if dtype != torch.float32:  # before the next step, too
        saved = full_state_dict(optimizer, to_all=True)["state"]
        assert all(torch.equal(saved[i]["main_param"], p.float().cpu()) for i, p in enumerate(model[0].parameters()))
    optimizer.param_groups[0]["lr"] = 0.0
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(model[0].weight, other[0].weight) and torch.equal(model[0].bias, other[0].bias)
    assert main_of(optimizer, model[4].bias) == main_before


def main_of(optimizer, param):
    """This rank's part of a parameter in fp32 -> list."""
    return [main.tolist() for one, _, _, main in optimizer.pieces() if one is param]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stage", STAGES[2:])
def test_weights_that_are_loaded_into_the_model_are_not_undone(run, stage, dtype):
    run(loaded, stage, dtype)


def moved(rank, stage, how):
    model = net(rank)
    optimizer = optimizer_of(stage)(model.parameters(), **SGD)
    if how == "after clip_grad_norm_":
        loss(model, rank).backward()
        optimizer.clip_grad_norm_(1.0)
        model.double()
        return error_of(optimizer.step)
    if how == "double":
        model.double()
    else:
        doubled = 2 * torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(doubled, model.parameters())
    loss(model, rank).backward()
    return error_of(optimizer.step)


@pytest.mark.parametrize("how", ["double", "vector_to_parameters", "after clip_grad_norm_"])
@pytest.mark.parametrize("stage", STAGES[2:])
def test_parameters_whose_memory_was_replaced_are_an_error_that_names_one(run, stage, how):
    for message in run(moved, stage, how):
        assert "parameter 0 of group 0 was replaced" in message


def scaled(rank, stage):
    """An inf in the second step, and model.zero_grad(). -> the scales"""
    model = net(rank)
    other, ddp, plain = with_ddp(rank, model)
    scales = []
    for one, its_optimizer in ((model, optimizer_of(stage)(model.parameters(), **SGD)), (ddp, plain)):
        scaler = torch.amp.GradScaler(rank.device.type, init_scale=64.0, growth_interval=1000)
        for step in range(4):
            explodes = step == 1 and rank.rank == rank.world_size - 1
            scaler.scale(loss(one, rank, step) * (torch.inf if explodes else 1)).backward()
            scaler.step(its_optimizer)
            scaler.update()
            one.zero_grad()
        scales.append(scaler.get_scale())
    assert_same(model, other, rank.world_size)
    return scales


@pytest.mark.parametrize("world_size", [2, 3])
def test_after_an_inf_and_model_zero_grad_training_goes_on(run, stage, world_size):
    assert run(scaled, stage) == [[32.0, 32.0]] * world_size


def double_norm(rank, stage):
    """One fp64 element: the other ranks own nothing, and must not send a norm of another size."""
    param = torch.nn.Parameter(torch.ones((), dtype=torch.float64, device=rank.device))
    optimizer = optimizer_of(stage)([param], **SGD)
    (3.0 * param).backward()
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert norm.item() == 3.0 and param.item() == pytest.approx(0.9)


def test_the_norm_of_fp64_gradients(run, stage):
    run(double_norm, stage)


def doubles(rank):
    """Steps of 1e-12, which fp32 would lose beside 1."""
    param = torch.nn.Parameter(torch.ones(9, dtype=torch.float64, device=rank.device))
    optimizer = DistributedOptimizer([param], torch.optim.SGD, lr=1e-12)
    param.sum().backward()
    optimizer.step()
    assert torch.equal(param, torch.full_like(param, 1 - 1e-12))


def test_fp64_is_stepped_in_fp64(run):
    run(doubles)


# -------------------------------------------------------------------------------------- stage 4: who reads, and when


class Listed(torch.nn.Module):
    """Parameters in containers that are never called, one inside the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.by_name = torch.nn.ParameterDict({"gain": torch.ones(7)})
        self.nested = torch.nn.ModuleList([torch.nn.ParameterList([torch.rand(7, 7), torch.rand(7, 7)])])
        self.head = torch.nn.Linear(7, 3)

    def forward(self, x):
        for weight in self.nested[0]:
            x = torch.tanh(x @ weight) * self.by_name["gain"]
        return self.head(x)


def functional(model, rank, step):
    """torch.func: what the modules have while they are called are other tensors."""
    params = dict(model.named_parameters())
    x, _ = batch(step, rank.rank)

    def function(params):
        return torch.func.functional_call(model, params, (x.to(rank.device),)).square().mean()
    for name, grad in torch.func.grad(function)(params).items():
        params[name].grad = grad


def reads(rank, how):
    model = (Listed() if how == "containers" else net(rank)).to(rank.device)
    other, ddp, plain = with_ddp(rank, model)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, **SGD)
    optimizer.prefetch_params(model)
    if rank.rank == 0:
        leave_late(optimizer)
    for step in range(3):
        if how == "torch.func":
            functional(model, rank, step)
        else:
            loss(model, rank, step).backward()
        loss(ddp, rank, step).backward()
        for its_optimizer in (optimizer, plain):
            its_optimizer.step()
            its_optimizer.zero_grad()
    optimizer.finish_param_sync()
    assert_same(model, other, rank.world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["containers", "torch.func"])
def test_modules_wait_for_all_that_they_read(run, how, world_size):
    run(reads, how)


class Reader(torch.nn.Module):
    """Reads a weight of a module that it never calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.called, self.read = torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)

    def forward(self, x):
        return torch.nn.functional.linear(self.called(x), self.read.weight)


def evaluates(rank, with_grad):
    model = Reader().to(rank.device)
    optimizer = DistributedOptimizer(model.parameters(), bucket_cap_mb=ONE_PARAM, find_unused_parameters=True, **SGD)
    optimizer.prefetch_params(model)
    if rank.rank == 0:
        leave_late(optimizer)
    loss(model, rank).backward()
    optimizer.step()
    with torch.set_grad_enabled(with_grad):
        seen = loss(model.eval(), rank).item()
        optimizer.finish_param_sync()
        assert seen == loss(model, rank).item()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("with_grad", [True, False])
def test_an_evaluation_sees_finished_parameters_whoever_reads(run, with_grad, world_size):
    run(evaluates, with_grad)


def old_graph(rank, prefetch):
    """A graph that has read parameters before they were stepped; what it is asked for is no parameter's gradient."""
    model = net(rank)
    optimizer = DistributedOptimizer(model.parameters(), **SGD)
    if prefetch:
        optimizer.prefetch_params(model)
    x = torch.ones(2, 7, device=rank.device, requires_grad=True)
    old = model(x).sum()
    loss(model, rank, step=1).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward(inputs=[x])


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_graph_that_has_read_other_parameters_is_refused(run, prefetch):
    run(old_graph, prefetch)


def is_copied(rank):
    model = net(rank)
    optimizer = DistributedOptimizer(model.parameters(), **SGD)
    optimizer.prefetch_params(model)
    loss(model, rank).backward()
    optimizer.step()
    optimizer.finish_param_sync()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert loss(other, rank).item() == loss(model, rank).item()
        loss(other, rank).backward()
        assert all(param.grad is not None for param in other.parameters())  # no bucket of ours has taken it


def test_a_model_is_saved_and_copied_with_its_hooks(run):
    run(is_copied)


def nested(rank):
    """Between and after the two they keep gradients, and the next pass outside takes all of them away."""
    model = net(rank)
    optimizer = DistributedOptimizer(model.parameters(), **SGD)
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        loss(model, rank).backward()
    assert all(param.grad is not None for param in model.parameters())
    loss(model, rank).backward()
    assert all(param.grad is None for param in model.parameters())


def test_no_sync_inside_no_sync(run):
    run(nested)


def bad_arguments(rank, kwargs):
    return error_of(lambda: DistributedOptimizer(net(rank).parameters(), **kwargs), ValueError)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("kwargs", [{"reduce_dtype": torch.float16}, {"bucket_cap_mb": -3}, {"bucket_cap_mb": 0}])
def test_arguments_that_mean_nothing_are_refused(run, kwargs, world_size):
    for message in run(bad_arguments, kwargs):
        assert f"{list(kwargs)[0]} is {list(kwargs.values())[0]}" in message


def loads_optimizer_only(rank, stage, dtype):
    model = net(rank, dtype=dtype)
    optimizer = optimizer_of(stage)(model.parameters(), **SGD, momentum=0.9)
    loss(model, rank).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    loss(model, rank).backward()
    optimizer.step()
    return all((param == 7).all() for param in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", STAGES[2:])
def test_state_of_the_optimizer_does_not_touch_the_model(run, stage, dtype, world_size):
    assert all(run(loads_optimizer_only, stage, dtype))


# --------------------------------------------------------------------------- stage 4: in which order, and by what means


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def params_of_4(**kwargs):
    params = [torch.nn.Parameter(torch.ones(64 * (i + 1))) for i in range(4)]
    return params, DistributedOptimizer(params, bucket_cap_mb=ONE_PARAM, **SGD, **kwargs)


def test_parameters_leave_in_the_order_of_the_forward_pass(fake_group):
    params, optimizer = params_of_4()
    sum(param.sum() for param in params).backward()
    with Ledger() as ledger:
        optimizer.step()
    sizes = [entry.size for entry in ledger.entries if entry.kind == "all_gather"]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4  # as `params`; gradients leave the other way round


def test_reduce_dtype_exchanges_parts_where_there_is_a_native_reduce_scatter(fake_group):
    params, optimizer = params_of_4(reduce_dtype=torch.float32)
    with Ledger() as ledger:
        sum(param.sum() for param in params).backward()
        optimizer.finish_grad_sync()
    assert ledger.collectives == {"send": 3 * 4, "recv": 3 * 4, "all_reduce": 1}  # which is the agreement


def test_buckets_leave_in_backward_although_a_parameter_is_frozen(fake_group):
    params, optimizer = params_of_4()
    params[3].requires_grad_(False)  # of the first bucket to leave
    with Ledger() as ledger:
        sum(param.sum() for param in params[:3]).backward()
    assert ledger.collectives == {"reduce_scatter": 4}


# ----------------------------------------------------------------------------------------- found by readers, all stages


def frozen_at_first(rank, stage, frozen):
    """SGD by hand: two passes with a synchronization in between, of a parameter that was frozen at construction."""
    weight = torch.nn.Parameter(torch.zeros(64, device=rank.device))
    optimizer = optimizer_of(stage)([weight.requires_grad_(not frozen)], **{**SGD, "lr": 1.0})
    weight.requires_grad_(True)
    optimizer.zero_grad()
    (weight.sum() * (1 + rank.rank)).backward()
    optimizer.clip_grad_norm_(1e6)
    (weight.sum() * (10 + 10 * rank.rank)).backward()
    optimizer.step()
    if stage == FOUR:
        optimizer.finish_param_sync()
    return weight.unique().tolist()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_pass_after_a_synchronization_counts(run, stage, world_size, frozen):
    if stage == "stage3_gradbuffer":  # documented: no backward pass there
        assert all("call step() or the optimizer's zero_grad()" in message for message in run(error_after_sync, frozen))
    else:
        assert run(frozen_at_first, stage, frozen) == [[-16.5], [-16.5]]


def error_after_sync(rank, frozen):
    return error_of(lambda: frozen_at_first(rank, "stage3_gradbuffer", frozen), RuntimeError)


def of_another_stage(rank, older, newer):
    """Two optimizers, which both live, step a weight by -1 twice each."""
    for dtype, grad_dtype in [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]:
        weight, kept = torch.nn.Parameter(torch.zeros(64, dtype=dtype, device=rank.device)), []
        for stage in (older, newer):
            weight.grad = None
            options = {"grad_dtype": grad_dtype} if stage == "stage3_gradbuffer" else {}
            optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=1.0, **options)
            kept.append(optimizer)
            for _ in range(2):
                weight.sum().backward()
                assert optimizer.clip_grad_norm_(100.0).item() == pytest.approx(8)
                optimizer.step()
                optimizer.zero_grad()
        assert weight.unique().tolist() == [-4]
        assert hasattr(weight, "main_grad") == (newer == "stage3_gradbuffer" and grad_dtype is not None)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("older, newer", list(itertools.permutations(STAGES, 2)))
def test_a_newer_optimizer_of_another_stage_has_the_gradients(run, older, newer, world_size):
    run(of_another_stage, older, newer)


def an_older_one(rank, older, newer):
    """Stage 3: both optimizers live, and the older one has given up a step after clipping."""
    weight = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16, device=rank.device))
    kept = []
    for grad_dtype in (older, newer):
        optimizer = optimizer_of("stage3_gradbuffer")([weight], **{**SGD, "lr": 1.0}, grad_dtype=grad_dtype)
        kept.append(optimizer)
        optimizer.zero_grad()  # what is there already counts, as in torch
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
        weight.sum().backward()
        optimizer.clip_grad_norm_(1.0)
    weight.grad = None
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    return weight.unique().tolist(), hasattr(weight, "main_grad")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("older", [None, torch.float32])
@pytest.mark.parametrize("newer", [None, torch.float32])
def test_a_newer_optimizer_has_the_gradients_to_itself(run, world_size, older, newer):
    assert run(an_older_one, older, newer) == [([-5.0], newer is not None)] * world_size


def named_in_part(rank, stage):
    """torch refuses it when the second group is added: by then the first one would have been broadcast."""
    weights = [torch.nn.Parameter(torch.full((3,), float(rank.rank), device=rank.device)) for _ in range(2)]
    groups = [{"params": [("a", weights[0])]}, {"params": weights[1:]}]
    message = error_of(lambda: optimizer_of(stage)(groups, **SGD), ValueError)
    optimizer = optimizer_of(stage)([torch.nn.Parameter(torch.ones(3, device=rank.device))], **SGD)
    assert error_of(lambda: optimizer.add_param_group({"params": [("a", weights[0])]}), ValueError) == message
    return message, all(weight.eq(rank.rank).all().item() for weight in weights)


@pytest.mark.parametrize("world_size", [2])
def test_groups_of_which_some_have_names_are_refused_at_once(run, stage, world_size):
    for message, is_unchanged in run(named_in_part, stage):
        assert "name all of them or none" in message and is_unchanged


EDITS = {
    "a group taken out": lambda groups: groups.pop(0),
    "groups turned round": lambda groups: groups.reverse(),
    "a parameter taken out": lambda groups: groups[0]["params"].pop(),
    "a parameter replaced": lambda groups: groups[1]["params"].__setitem__(0, torch.nn.Parameter(torch.ones(7, 7))),
}


def edited(rank, stage, edit):
    model = net(rank)
    params = list(model.parameters())
    optimizer = optimizer_of(stage)([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], **SGD)
    loss(model, rank).backward()
    before = copy.deepcopy(model.state_dict())
    EDITS[edit](optimizer.param_groups)
    message = error_of(optimizer.step, RuntimeError)
    assert all(torch.equal(param, before[name]) for name, param in model.state_dict().items())
    return message


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_param_groups_are_refused(run, stage, world_size, edit):
    for message in run(edited, stage, edit):
        assert "the parameters in param_groups have changed: add them with add_param_group()" in message


def assigned_after_a_skip(rank, stage):
    """An inf on rank 1 makes all skip; then gradients by hand, which are averaged as any others are."""
    weight = torch.nn.Parameter(torch.zeros(5, device=rank.device))
    optimizer, scaler = optimizer_of(stage)([weight], torch.optim.SGD, lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum() * (torch.inf if rank.rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    weight.grad = torch.full_like(weight, 1.0 + rank.rank)
    optimizer.step()
    return weight.unique().tolist()


@pytest.mark.parametrize("world_size", [2])
def test_gradients_by_hand_after_a_step_that_was_skipped(run, stage, world_size):
    assert run(assigned_after_a_skip, stage) == [[-1.5], [-1.5]]


def nesterov(rank, stage):
    """foreach, torch's default on CUDA, writes into the gradients that it steps with."""
    kwargs = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}
    model = net(rank)
    other = copy.deepcopy(model)
    plain = torch.optim.SGD(other.parameters(), **kwargs)
    optimizer, ddp = optimizer_of(stage)(model.parameters(), torch.optim.SGD, **kwargs), DistributedDataParallel(other)
    for step in range(3):
        step_both(rank, step, (model, optimizer), (ddp, plain))
    assert_same(model, other, rank.world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_nesterov_with_foreach_is_elementwise(run, stage, world_size):
    run(nesterov, stage)


# --------------------------------------------------------------------------------------------------------- a pipeline


def in_a_pipeline(rank, stage, schedule, scales):
    """Two pipeline stages, two replicas. `scales`: the schedule divides param.grad after the last micro-batch."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("pp", "dp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    plain = net(rank)
    model = copy.deepcopy(plain[:2] if place == 0 else plain[2:])
    kwargs = {"bucket_cap_mb": ONE_PARAM} if stage == FOUR else {}
    optimizer = optimizer_of(stage)(model.parameters(), process_group=mesh["dp"].get_group(), **SGD, **kwargs)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    pipe = PipelineStage(model, place, 2, rank.device, group=mesh["pp"].get_group())
    scale = 1 if scales else 1 / 4
    options = {"n_microbatches": 4, "loss_fn": lambda y, t: scale * (y - t).square().mean(), "scale_grads": scales}
    schedule = schedule(pipe, **options)
    for step in range(3):
        data = [(x.to(rank.device), x[:, :3].to(rank.device)) for x, _ in (batch(step, r) for r in range(2))]
        x, target = data[replica]
        with optimizer.no_sync() if scales else contextlib.nullcontext():
            schedule.step(x) if place == 0 else schedule.step(target=target)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        (sum((plain(x) - target).square().mean() for x, target in data) / 2).backward()
        reference.step()
    for param, expected in zip(model.parameters(), (plain[:2] if place == 0 else plain[2:]).parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_pipeline_trains_like_one_process(run, stage, schedule, scales, world_size):
    run(in_a_pipeline, stage, schedule, scales)


def dropped_without_gc(rank, stage):
    model = net(rank)
    optimizer = optimizer_of(stage)(model.parameters(), **SGD)
    loss(model, rank).backward()
    optimizer.step()
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(model[0].weight)
        del optimizer, model
        return gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("world_size", [2])
def test_what_nobody_has_any_more_is_freed_at_once(run, stage, world_size):
    """As with torch's own optimizers: Python counts objects, not bytes, before it looks for reference cycles."""
    assert all(run(dropped_without_gc, stage))


class Interrupted:
    """Work during whose wait() a signal arrives: Python runs the handler as soon as it returns."""

    def __init__(self, work, handler):
        self.work, self.handler = work, handler

    def wait(self):
        self.work.wait()
        handler, self.handler = self.handler, lambda: None
        handler()


def read_in_a_signal_handler(rank):
    model = net(rank)
    optimizer = DistributedOptimizer(model.parameters(), **SGD)
    optimizer.prefetch_params(model)
    loss(model, rank).backward()
    optimizer.step()
    kept = []
    for bucket in optimizer.buckets:
        bucket.param_sync = [Interrupted(work, lambda: kept.append(copy.deepcopy(model))) for work in bucket.param_sync]
    loss(model, rank, step=1).backward()
    assert_same(kept[0], model, 1)
    optimizer.step()


@pytest.mark.parametrize("world_size", [2])
def test_a_signal_handler_may_keep_the_parameters(run, world_size):
    run(read_in_a_signal_handler)
