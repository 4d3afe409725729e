"""What people do to the model while an optimizer has it: build another optimizer, freeze, load, move, copy, read oddly.

Each is what replicated training makes of it, or an error that says what to do: on every rank, and never silence.
"""

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from checkpoint import full_state_dict
from harness.ledger import Ledger
from tests.common import STAGES, Net, batch, error_of, on_ranks, one_rank_of, optimizer_of, trainable
from tests.pairs import (
    SGD,
    SMALL,
    Pair,
    Replicated,
    assert_same,
    backward,
    deliver_when_asked,
    parameter_of,
    sgd_of,
    train,
)
from tests.ranks import ROOT

ONE, TWO, THREE, FOUR = STAGES
PREFETCH = [*((stage, False) for stage in STAGES), (FOUR, True)]


def let_go(thing):
    """-> an event, set when nobody has `thing` any more: threads of gloo's and of autograd's let go of it late."""
    event = threading.Event()
    weakref.finalize(thing, event.set)
    return event
@on_ranks(2, is_dropped=[True, False])
def test_another_optimizer_over_the_same_parameters(rank, stage, is_dropped):
    """Three optimizers, one after the other, of which the older ones live on, or don't."""
    model, kept, expected = Net(seed=0).to(rank.device), [], Replicated(rank, torch.optim.SGD, lr=0.1)
    for turn in range(3):
        optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.1)
        if stage == FOUR:  # parameters that are still under way would arrive on top of the new ones
            assert all(bucket.param_sync is None for one in kept for bucket in one.buckets)
            optimizer.prefetch_params(model)
            deliver_when_asked(optimizer)
        kept += [] if is_dropped else [optimizer]
        for step in (2 * turn, 2 * turn + 1):
            train(model, optimizer, rank, step)
            expected.step(step)
    assert_same(model, expected.model, exact=True)


KINDS = [(ONE, {}), (TWO, {}), (THREE, {"grad_dtype": None}), (THREE, {"grad_dtype": torch.float32}), (FOUR, {})]


@on_ranks(2, dtype=[torch.float32, torch.bfloat16], older=KINDS, newer=KINDS)
def test_a_newer_optimizer_has_the_gradients(rank, dtype, older, newer):
    """Both live. Each subtracts 1 twice, and then the older one has given up a step after clipping."""
    weight, kept = torch.nn.Parameter(torch.zeros(64, dtype=dtype, device=rank.device)), []
    for stage, kwargs in (older, newer):
        weight.grad = None
        optimizer = sgd_of(stage, [weight], **kwargs)
        kept.append(optimizer)
        optimizer.zero_grad()
        for _ in range(2):
            weight.sum().backward()
            assert optimizer.clip_grad_norm_(100.0).item() == pytest.approx(8)
            optimizer.step()
            optimizer.zero_grad()
        assert weight.unique().tolist() == [-2 * len(kept)]
        assert hasattr(weight, "main_grad") == (dtype == torch.bfloat16 and kwargs.get("grad_dtype") is not None)
        weight.sum().backward()
        optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize("stage, prefetch", PREFETCH)
@on_ranks(2, before_its_model=[False, True])
def test_an_optimizer_that_is_gone_leaves_nothing_and_is_freed_at_once(rank, stage, prefetch, before_its_model):
    """As with torch's own optimizers: Python counts objects, not bytes, before it looks for reference cycles."""
    def train_two():
        model, called = Net(seed=0).to(rank.device), []
        model.scale.register_post_accumulate_grad_hook(lambda _: called.append("the user's hook"))
        for _ in range(2):  # as in a search for a learning rate
            optimizer = sgd_of(stage, trainable(model))
            if prefetch:
                optimizer.prefetch_params(model)
        assert [len(model.scale._post_accumulate_grad_hooks), len(model.up._forward_pre_hooks)] == [1 + 1, prefetch]
        for step in range(2):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        assert len(called) == 2
        if before_its_model:
            gone = weakref.ref(optimizer)
            del optimizer
            assert gone() is None
            backward(model, rank, 2)
        return let_go(model.up.weight)

    gc.collect()
    gc.disable()
    try:
        assert all(event.wait(60) for event in [train_two() for _ in range(5)])
    finally:
        gc.enable()


@on_ranks()
def test_an_optimizer_that_is_dropped_while_gradients_travel(rank):
    """Stage 4: messages arrive all the same, or those of the next one would be taken for them; all else is freed."""
    for step in range(3):
        pair = Pair(rank, FOUR, torch.optim.SGD, own=SMALL, **SGD)
        pair.train(step)
        pair.assert_same()
        pair.backward(step + 1)
        assert pair.optimizer.travelling
        gone = [let_go(bucket) for bucket in pair.optimizer.buckets]
        del pair
        gc.collect()
        assert all(event.wait(60) for event in gone)


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


@pytest.mark.waits
def test_python_ends_without_a_word():
    """Every stage registers its hooks in the same way."""
    run = subprocess.run([sys.executable, "-c", PLAIN_SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


FREEZING = {  # o: the optimizer is made; f, u: a layer is frozen, or unfrozen; b: backward; s: step
    "frozen as the optimizer is made": "fo u bbs bbs",
    "unfrozen when the others have momentum": "o f bs u bs bs",  # torch's fused SGD refuses such a mixture
    "frozen after its gradient has come": "o b f s",
}


@pytest.mark.parametrize("stage, kwargs", [*((stage, {}) for stage in STAGES), (FOUR, SMALL)])
@on_ranks(2, script=FREEZING)
def test_a_layer_that_is_frozen_and_unfrozen_at_any_moment(rank, stage, kwargs, script):
    model, expected = Net(seed=0).to(rank.device), Replicated(rank, torch.optim.SGD, **SGD)
    params = trainable(model)
    for step, letter in enumerate(FREEZING[script].replace(" ", "")):
        if letter == "o":
            optimizer = optimizer_of(stage)(params, torch.optim.SGD, **SGD, **kwargs)
        elif letter == "b":
            backward(model, rank, step)
            expected.backward(step)
        elif letter == "s":
            for one in (optimizer, expected.optimizer):
                one.step()
                one.zero_grad()
        else:
            for one in (model, expected.model):
                one.down.requires_grad_(letter == "u")
    assert_same(model, expected.model, exact=False)


@pytest.mark.parametrize("stage", [ONE, TWO, FOUR])
@on_ranks(2)
def test_layers_that_are_frozen_on_some_ranks(rank, stage):
    """Each rank freezes another layer, of the same shape; then one rank freezes all of them."""
    params = [parameter_of(0, rank) for _ in range(3)]
    optimizer = sgd_of(stage, params)
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


@on_ranks(2)
def test_gradients_are_divided_before_they_are_added(rank, stage):
    """The sum of two gradients is more than fp16 can hold, their mean is not: DDP divides first."""
    param = torch.nn.Parameter(torch.zeros(5, device=rank.device, dtype=torch.float16))
    optimizer = optimizer_of(stage)([param], torch.optim.SGD, lr=1e-3)
    (param * 40000).sum().backward()
    optimizer.step()
    assert param.tolist() == pytest.approx([-40.0] * 5, rel=1e-3)  # stages 1 and 2 step it in 16 bits


@on_ranks(2)
def test_fp64_is_clipped_and_stepped_in_fp64(rank, stage):
    """Steps of 1e-12, which fp32 would lose beside 1; a rank that owns nothing sends a norm of the same size."""
    param = torch.nn.Parameter(torch.ones((), dtype=torch.float64, device=rank.device))
    optimizer = optimizer_of(stage)([param], torch.optim.SGD, lr=1e-12)
    (3.0 * param).backward()
    assert optimizer.clip_grad_norm_(1.0).item() == 3.0
    optimizer.step()
    assert param.item() == pytest.approx(1 - 1e-12, rel=1e-15)


@on_ranks(2, when=["before", "after"])
def test_a_model_in_shared_memory(rank, stage, when):
    """It stays there, for processes that read it. Not in stage 4, where it can't be moved there later either."""
    if rank.device.type != "cpu":  # a GPU's memory is shared always
        return
    model, expected = Net(seed=0), Replicated(rank, torch.optim.SGD, **SGD)
    if when == "before":
        model.share_memory()
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, **SGD)
    for step in range(2):
        if stage == FOUR and step == 1:
            with pytest.raises(RuntimeError, match=r"data of parameter .* was replaced, by .*share_memory\(\)"):
                train(model, optimizer, rank, step)
            return
        train(model, optimizer, rank, step)
        expected.step(step)
        model.share_memory()
    assert all(param.is_shared() for param in trainable(model))
    assert_same(model, expected.model, exact=True)


@pytest.mark.parametrize("stage, prefetch", PREFETCH[1:])
@on_ranks(2, dtype=[torch.float32, torch.bfloat16])
def test_each_parameter_has_a_storage_of_its_own(rank, stage, prefetch, dtype):
    """Who saves or copies one tensor gets that tensor. Of 16 bits too, of no elements, and while on the way."""
    model = Net(seed=0).to(rank.device, dtype)
    model.empty = torch.nn.Parameter(torch.ones(0, 3, dtype=dtype, device=rank.device))
    params = trainable(model)
    optimizer = optimizer_of(stage)(params, lr=0.1, **({"find_unused_parameters": True} if stage == FOUR else {}))
    if prefetch:
        optimizer.prefetch_params(model)
    for step in range(2):
        model(batch(step, rank.rank)[0].to(rank.device, dtype)).square().mean().backward()
        optimizer.step()
        assert [param.untyped_storage().nbytes() for param in params] == [param.nbytes for param in params]
        assert len({param.untyped_storage().data_ptr() for param in params if param.numel()}) == len(params) - 1
        assert all(len(pickle.dumps(param.detach())) < param.nbytes + 1000 for param in params)
        assert copy.deepcopy(model.scale).untyped_storage().nbytes() == model.scale.nbytes
    values = [param.detach().clone() for param in params]
    del optimizer
    gc.collect()
    torch.full((1000,), torch.nan, device=rank.device)  # in memory that was freed, if it was
    assert all(map(torch.equal, params, values))


ROWS = [(torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("stage", [THREE, FOUR])
@on_ranks(2, row=ROWS)
def test_what_is_written_into_a_parameter_between_steps_is_stepped_next(rank, stage, row):
    """By model.load_state_dict() say. What has the value that it had keeps what 16 bits don't hold of it."""
    dtype, grad_dtype = row
    tiny = 2**-14  # three of these beside 1 are lost in 16 bits
    weight = torch.nn.Parameter(torch.ones(70, dtype=dtype, device=rank.device))
    kwargs = {"grad_dtype": grad_dtype} if stage == THREE else {}
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=tiny, **kwargs)

    def step():
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    saved = optimizer.state_dict()
    written = weight.detach().clone()
    written[::2] = 7
    with torch.no_grad():
        weight.copy_(written)
    if dtype != torch.float32:  # a save before the next step has it, too
        main_param = full_state_dict(optimizer, to_all=True)["state"][0]["main_param"]
        assert main_param.unique().tolist() == [1 - 3 * tiny, 7]
    step()
    expected = torch.tensor([7 - tiny, 1 - 4 * tiny] * 35, device=rank.device)
    assert torch.equal(weight, expected.to(dtype))
    for _, start, stop, main in optimizer.pieces():
        assert torch.equal(main, expected[start:stop])
    with torch.no_grad():
        weight.fill_(5)
    optimizer.load_state_dict(saved)  # has nothing to do with the model
    optimizer.param_groups[0]["lr"] = 0.0
    step()
    assert weight.unique().tolist() == [5]


MOVES = {
    "double": lambda model, optimizer: model.double(),
    "bfloat16": lambda model, optimizer: model.bfloat16(),
    "bfloat16, and zero_grad": lambda model, optimizer: (model.bfloat16(), optimizer.zero_grad()),
    "vector_to_parameters": lambda model, optimizer: torch.nn.utils.vector_to_parameters(
        2 * torch.nn.utils.parameters_to_vector(trainable(model)).detach(), trainable(model)),
}


@pytest.mark.parametrize("stage", [THREE, FOUR])
@on_ranks(2, how=MOVES, when=["before backward", "after clipping"])
def test_parameters_whose_memory_was_replaced_are_an_error_that_names_one(rank, stage, how, when):
    model = Net(seed=0).to(rank.device)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, **SGD)
    train(model, optimizer, rank, 0)
    if when == "after clipping":
        backward(model, rank, 1)
        optimizer.clip_grad_norm_(1.0)
    MOVES[how](model, optimizer)
    if when == "before backward" or "zero_grad" in how:
        model(batch(1, rank.rank)[0].to(model.scale)).sum().backward()
    assert "the data of parameter 0 of group 0 was replaced, by model.to()" in error_of(optimizer.step)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@on_ranks(2, how=["create_graph", "nesterov", "inf"])
def test_gradients_that_are_more_than_numbers_to_add(rank, stage, how):
    """They have a graph; a step writes into them, as foreach does, torch's default on CUDA; they are scaled, and an inf
    on one rank makes all skip, after which model.zero_grad() is all that is called.
    """
    sgd = {**SGD, "nesterov": True, "foreach": True} if how == "nesterov" else SGD
    pair = Pair(rank, stage, torch.optim.SGD, **sgd)
    model, optimizer = pair.model, pair.optimizer
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=64.0, enabled=how == "inf")
    for step in range(4):
        is_inf = how == "inf" and step == 1
        x, y = batch(step, rank.rank, device=rank.device)
        loss = scaler.scale(F.mse_loss(model(x), y))
        (loss * torch.inf if is_inf and rank.rank == 1 else loss).backward(create_graph=how == "create_graph")
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        if not is_inf:
            pair.replicated.step(step)
    assert how != "inf" or scaler.get_scale() == 32
    pair.assert_same(is_exact=False)


@pytest.mark.shared_guard
@on_ranks(2)
def test_groups_of_which_some_have_names_are_refused_at_once(rank, stage):
    """torch refuses it when the second group is added: by then the first one would have been broadcast."""
    weights = [parameter_of(rank.rank, rank) for _ in range(2)]
    groups = [{"params": [("a", weights[0])]}, {"params": weights[1:]}]
    message = error_of(lambda: sgd_of(stage, groups), ValueError)
    assert "should be with/without names" in message and all(weight.eq(rank.rank).all() for weight in weights)
    assert "with/without names" in error_of(lambda: sgd_of(stage, weights[1:]).add_param_group(groups[0]), ValueError)


EDITS = {
    "a group taken out": lambda groups: groups.pop(0),
    "groups turned round": lambda groups: groups.reverse(),
    "a parameter taken out": lambda groups: groups[0]["params"].pop(),
    "a parameter replaced": lambda groups: groups[1]["params"].__setitem__(0, torch.nn.Parameter(torch.ones(()))),
}


@pytest.mark.shared_guard
@on_ranks(2, edit=EDITS)
def test_edited_param_groups_are_refused(rank, stage, edit):
    model = Net(seed=0).to(rank.device)
    params = trainable(model)
    optimizer = sgd_of(stage, [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}])
    backward(model, rank, 0)
    EDITS[edit](optimizer.param_groups)
    error = error_of(optimizer.step)
    assert "the parameters in param_groups have changed: add them with add_param_group()" in error
    assert_same(model, Net(seed=0).to(rank.device), exact=True)


@on_ranks(2)
def test_modules_wait_for_all_that_a_function_of_torch_func_reads(rank):
    """Stage 4: what modules have while torch.func calls them are other tensors."""
    pair = Pair(rank, FOUR, torch.optim.SGD, own=SMALL, prefetch=True, **SGD)
    deliver_when_asked(pair.optimizer)
    model = pair.model
    for step in range(3):
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        x, y = batch(step, rank.rank, device=rank.device)
        grads = torch.func.grad(lambda params: F.mse_loss(torch.func.functional_call(model, params, (x,)), y))(params)
        for name, grad in grads.items():
            params[name].grad = grad
        pair.replicated.backward(step)
        pair.step()
    pair.assert_same(is_exact=False)


@on_ranks(2)
def test_no_sync_inside_no_sync(rank):
    """Stage 4 keeps gradients between and after the two, and the next pass outside takes all of them away."""
    params = [parameter_of(0, rank) for _ in range(2)]
    optimizer = sgd_of(FOUR, params)
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        sum(param.sum() for param in params).backward()
    assert all(param.grad is not None for param in params)
    sum(param.sum() for param in params).backward()
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("frozen, kwargs, in_backward", [
    (None, {}, {"reduce_scatter": 4}), (3, {}, {"reduce_scatter": 4}),
    (None, {"reduce_dtype": torch.float32}, {"send": 3 * 4, "recv": 3 * 4})])
def test_messages_where_the_collectives_are_native(frozen, kwargs, in_backward):
    """Buckets leave in backward, also where the parameter of the first one to leave is frozen; parameters in the order
    of the forward pass."""
    with one_rank_of(4):
        params = [torch.nn.Parameter(torch.ones(64 * (i + 1))) for i in range(4)]
        optimizer = sgd_of(FOUR, params, **SMALL, **kwargs)
        if frozen:
            params[frozen].requires_grad_(False)
        waiting = []
        params[0].register_hook(lambda _: waiting.append(len(optimizer.queue)))
        with Ledger() as ledger:
            sum(param.sum() for param in params if param.requires_grad).backward()
        assert ledger.collectives == in_backward and waiting == [1]
        with Ledger() as ledger:
            optimizer.step()
    assert ledger.collectives == {"all_reduce": 1, "all_gather": 4}
    assert [entry.size for entry in ledger.entries if entry.kind == "all_gather"] == [4 * 64 * n for n in (1, 2, 3, 4)]


@on_ranks(4, schedule=[ScheduleGPipe, Schedule1F1B], scales=[False, True])
def test_a_pipeline_trains_like_one_process(rank, stage, schedule, scales):
    """Two pipeline stages, two replicas. `scales`: the schedule divides param.grad after the last micro-batch."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("pp", "dp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7)).to(rank.device)
    own = plain[:2] if place == 0 else plain[2:]
    model = copy.deepcopy(own)
    kwargs = {"process_group": mesh["dp"].get_group(), **(SMALL if stage == FOUR else {})}
    optimizer = optimizer_of(stage)(model.parameters(), torch.optim.SGD, lr=0.1, **kwargs)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    pipe = PipelineStage(model, place, 2, rank.device, group=mesh["pp"].get_group())
    scale = 1 if scales else 1 / 4
    options = {"n_microbatches": 4, "loss_fn": lambda y, t: scale * (y - t).square().mean(), "scale_grads": scales}
    schedule = schedule(pipe, **options)
    for step in range(3):
        data = [batch(step, r, device=rank.device) for r in range(2)]
        x, target = data[replica]
        with optimizer.no_sync() if scales else contextlib.nullcontext():
            schedule.step(x) if place == 0 else schedule.step(target=target)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        (sum((plain(x) - target).square().mean() for x, target in data) / 2).backward()
        reference.step()
    for param, expected in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)
