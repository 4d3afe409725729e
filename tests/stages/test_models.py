"""What people do to a model that an optimizer has: build another optimizer, write into parameters, move the model.

A stage then does what replicated training does, or raises an error on every rank that says what to do.
"""

import functools
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from checkpoint import full_state_dict
from harness import STAGE_1, STAGE_3, STAGE_4
from tests.common import Net, batch, error_of, mesh_of, on_ranks, optimizer_of, trainable
from tests.pairs import PREFETCH, SGD, SMALL, Pair, Replicated, assert_same, backward, parameter_of, sgd_of, train
from tests.ranks import ROOT


def let_go(thing):
    """Return an event that is set when nobody refers to `thing`. Threads of gloo and of autograd do so for a while."""
    event = threading.Event()
    weakref.finalize(thing, event.set)
    return event


# Optimizers: a stage and its arguments.
KINDS = [(STAGE_1, {}), (STAGE_3, {}), (STAGE_3, {"grad_dtype": torch.float32}), (STAGE_4, {})]


@on_ranks(2, older=KINDS, newer=KINDS)
def test_a_newer_optimizer_has_the_gradients(rank, older, newer):
    """Build two optimizers of a parameter, and keep both. Each subtracts 1 twice, and then clips without a step."""
    weight = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16, device=rank.device))
    alive = []
    for stage, kwargs in (older, newer):
        weight.grad = None
        optimizer = sgd_of(stage, [weight], **kwargs)
        alive.append(optimizer)
        optimizer.zero_grad()
        for _ in range(2):
            weight.sum().backward()
            assert optimizer.clip_grad_norm_(100.0).item() == pytest.approx(8)
            optimizer.step()
            optimizer.zero_grad()
        assert weight.unique().tolist() == [-2 * len(alive)]
        assert hasattr(weight, "main_grad") == ("grad_dtype" in kwargs)
        weight.sum().backward()
        optimizer.clip_grad_norm_(1.0)


def train_and_drop(rank, stage, prefetch, before_its_model):
    """Build two optimizers, as a search for a learning rate does, and train with the second one. Drop all.

    Return an event that is set when the model is gone. before_its_model: whether the optimizer is dropped first, and
    the model runs another backward pass.
    """
    model = Net(seed=0).to(rank.device)
    model.scale.register_post_accumulate_grad_hook(lambda _: None)  # the user's
    for _ in range(2):
        optimizer = sgd_of(stage, trainable(model))
        if prefetch:
            optimizer.prefetch_params(model)
    assert len(model.scale._post_accumulate_grad_hooks) == 2
    assert len(model.up._forward_pre_hooks) == (1 if prefetch else 0)
    optimizer.zero_grad()
    train(model, optimizer, rank, 0)
    if before_its_model:
        optimizer_is_alive = weakref.ref(optimizer)
        del optimizer
        assert optimizer_is_alive() is None
        backward(model, rank, 1)
    return let_go(model.up.weight)


@pytest.mark.parametrize("stage, prefetch", PREFETCH)
@on_ranks(2, before_its_model=[False, True])
def test_an_optimizer_that_is_gone_leaves_nothing_and_is_freed_at_once(rank, stage, prefetch, before_its_model):
    """Do without the garbage collector, because a collector that sees no bytes would let a GPU run out of memory."""
    gc.collect()
    gc.disable()
    try:
        assert train_and_drop(rank, stage, prefetch, before_its_model).wait(60)
    finally:
        gc.enable()


@on_ranks
def test_an_optimizer_that_is_dropped_while_gradients_travel(rank):
    """Drop an optimizer of stage 4 after backward(). Its messages must arrive, or the next optimizer would take them.

    All else of the optimizer is freed.
    """
    for step in range(3):
        pair = Pair(rank, STAGE_4, torch.optim.SGD, own=SMALL, **SGD)
        pair.train(step)
        pair.assert_same()
        pair.backward(step + 1)
        assert pair.optimizer.travelling
        gone = [let_go(bucket) for bucket in pair.optimizer.buckets]
        del pair
        gc.collect()
        assert all(event.wait(60) for event in gone)


@pytest.mark.waits
def test_python_ends_without_a_word():
    """Keep an optimizer in globals until Python ends: nothing is printed. All stages register hooks in the same way."""
    script = """
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
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert (run.returncode, run.stdout + run.stderr) == (0, b"")


@on_ranks(2)
def test_gradients_are_divided_before_they_are_added(rank, stage):
    """Average two gradients whose sum is more than fp16 can hold. Their mean is not, and DDP divides first, too."""
    param = torch.nn.Parameter(torch.zeros(5, device=rank.device, dtype=torch.float16))
    optimizer = optimizer_of(stage)([param], torch.optim.SGD, lr=1e-3)
    (param * 40000).sum().backward()
    optimizer.step()
    assert param.tolist() == pytest.approx([-40.0] * 5, rel=1e-3)  # stages 1 and 2 round to 16 bits


@pytest.mark.shared_guard
@on_ranks(2)
def test_a_group_that_is_added_has_the_state_that_its_class_makes_in_the_constructor(rank, stage):
    """Add a group to Adagrad, which moves each element by the learning rate in the first step."""
    first, second = parameter_of(0, rank), parameter_of(0, rank)
    optimizer = optimizer_of(stage)([first], torch.optim.Adagrad, lr=0.5)
    optimizer.add_param_group({"params": [second]})
    (first.sum() + second.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(second.detach(), torch.full_like(second, -0.5))


@on_ranks(2, dtype=[torch.float32, torch.bfloat16], prefetch=[False, True])
def test_each_parameter_has_a_storage_of_its_own(rank, dtype, prefetch):
    """Step in stage 4. A program that saves or copies a parameter saves no other one. Drop the optimizer: values stay.
    """
    model = Net(seed=0).to(rank.device, dtype)
    params = trainable(model)
    optimizer = optimizer_of(STAGE_4)(params, lr=0.1)
    if prefetch:
        optimizer.prefetch_params(model)
    model(batch(0, rank.number)[0].to(rank.device, dtype)).square().mean().backward()
    optimizer.step()
    assert [param.untyped_storage().nbytes() for param in params] == [param.nbytes for param in params]
    assert len({param.untyped_storage().data_ptr() for param in params}) == len(params)
    values = [param.detach().clone() for param in params]
    del optimizer
    gc.collect()
    torch.full((1000,), torch.nan, device=rank.device)  # overwrites memory that was freed
    assert all(map(torch.equal, params, values))


@pytest.mark.parametrize("stage", [STAGE_3, STAGE_4])
@on_ranks(2, dtype=[torch.float32, torch.bfloat16], grad_dtype=[None, torch.float32])
def test_what_is_written_into_a_parameter_between_steps_is_stepped_next(rank, stage, dtype, grad_dtype):
    """Write 7 into every second element. The others keep what 16 bits don't hold: three steps of 2**-14 below 1."""
    tiny = 2**-14
    weight = torch.nn.Parameter(torch.ones(70, dtype=dtype, device=rank.device))
    kwargs = {"grad_dtype": grad_dtype} if stage == STAGE_3 else {}
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=tiny, **kwargs)

    def step():
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    written = weight.detach().clone()
    written[::2] = 7
    with torch.no_grad():
        weight.copy_(written)
    if dtype == torch.bfloat16:  # a save before the next step has what was written, too
        main_param = full_state_dict(optimizer, to_all=True)["state"][0]["main_param"]
        assert main_param.unique().tolist() == [1 - 3 * tiny, 7]
    step()
    expected = torch.tensor([7 - tiny, 1 - 4 * tiny] * 35, device=rank.device)
    assert torch.equal(weight, expected.to(dtype))
    assert all(torch.equal(main, expected[start:stop]) for _, start, stop, main in optimizer.pieces())


@pytest.mark.parametrize("stage", [STAGE_3, STAGE_4])
@on_ranks(2, zeroes=[False, True], when=["before backward", "after clipping"])
def test_parameters_whose_memory_was_replaced_are_an_error_that_names_one(rank, stage, zeroes, when):
    """Convert the model to bfloat16 before a backward pass, or after clipping; then call zero_grad() or not.

    The step is refused, and so is torch's own clipping.
    """
    model = Net(seed=0).to(rank.device)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, **SGD)
    train(model, optimizer, rank, 0)
    if when == "after clipping":
        backward(model, rank, 1)
        optimizer.clip_grad_norm_(1.0)
    model.bfloat16()
    if zeroes:
        optimizer.zero_grad()
    if zeroes or when == "before backward":
        model(batch(1, rank.number)[0].to(model.scale)).sum().backward()
    assert "the data of parameter 0 of group 0 was replaced, by model.to()" in error_of(optimizer.step)
    if when == "before backward":
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        assert "the data of parameter of shape () was replaced, by model.to()" in error_of(clip)


@pytest.mark.shared_guard
@on_ranks(2)
def test_edited_param_groups_are_refused(rank, stage):
    params = [parameter_of(0, rank) for _ in range(4)]
    optimizer = sgd_of(stage, [{"params": params[:2]}, {"params": params[2:]}])
    sum(param.sum() for param in params).backward()
    optimizer.param_groups.reverse()
    error = error_of(optimizer.step)
    assert "the parameters in param_groups have changed: add them with add_param_group()" in error
    assert all(param.eq(0).all() for param in params)


@on_ranks(4)
def test_a_pipeline_trains_like_one_process(rank, stage):
    """Train two replicas of a model whose two layers are on two ranks. The loss is divided, and param.grad is not."""
    mesh = mesh_of(rank.device.type, (2, 2), ("pp", "dp"))
    place = mesh["pp"].get_local_rank()
    of_replica = rank._replace(number=mesh["dp"].get_local_rank(), world_size=2)

    def net(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Linear(7, 7))

    replicated = Replicated(of_replica, torch.optim.SGD, net=net, lr=0.1)
    layer = net(0)[place].to(rank.device)
    optimizer = optimizer_of(stage)(layer.parameters(), torch.optim.SGD, process_group=mesh["dp"].get_group(), lr=0.1)
    schedule = Schedule1F1B(PipelineStage(layer, place, 2, rank.device, group=mesh["pp"].get_group()),
                            n_microbatches=4, loss_fn=lambda y, t: F.mse_loss(y, t) / 4, scale_grads=False)
    for step in range(2):
        x, target = batch(step, of_replica.number, device=rank.device)
        if place == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        optimizer.step()
        optimizer.zero_grad()
        replicated.step(step)
    assert_same(layer, replicated.model[place], exact=False)
