"""16-bit parameters in stage 3: three dtype rows, each compared with replicated fp32 main parameters that are rounded
in the same places. And what a step allocates, and what the state weighs, at any number of ranks."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from harness.ledger import Ledger
from harness.memory import Memory
from stage3_gradbuffer import DistributedOptimizer
from tests.common import STAGES, Net, batch, loss_of, on_its_device, one_rank_of, optimizer_of, padding, trainable
from tests.stages.test_contract import ADAMW, SCHEDULERS

ROWS = {
    "bf16/bf16": (torch.bfloat16, None),
    "bf16/fp32": (torch.bfloat16, torch.float32),
    "fp16/fp16": (torch.float16, None),
    "fp16/fp32": (torch.float16, torch.float32),
    "fp32/fp32": (torch.float32, None),
}


class Mixed(torch.nn.Module):
    """16-bit matrices around an fp32 norm, tied, frozen and scalar parameters; `how`: activation checkpointing."""

    def __init__(self, seed, dtype, how=None):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(7, 7, dtype=dtype).requires_grad_(False)
        torch.manual_seed(seed)
        self.how = how
        self.first = torch.nn.Linear(7, 7, dtype=dtype)
        self.norm = torch.nn.LayerNorm(7)
        self.second = torch.nn.Linear(7, 7, dtype=dtype)
        self.second.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def block(self, x):
        x = torch.tanh(self.first(x)) * self.scale
        return self.norm(x.float()).to(x.dtype)

    def forward(self, x):
        x = self.frozen(x.to(self.scale.dtype)).requires_grad_()
        x = self.block(x) if self.how is None else checkpoint(self.block, x, use_reentrant=self.how == "reentrant")
        return self.second(x).float()


class Rounded:
    """Replicated training with fp32 main parameters: gradients are averaged in `grad_dtype`, parameters cast back."""

    def __init__(self, model, world_size, grad_dtype, groups=trainable, **kwargs):
        self.model, self.world_size, self.grad_dtype = model, world_size, grad_dtype
        groups = [g if isinstance(g, dict) else {"params": [g]} for g in groups(model)]
        self.params = [param for group in groups for param in group["params"]]
        self.main = {param: param.detach().float().clone() for param in self.params}
        main_groups = [{**group, "params": [self.main[param] for param in group["params"]]} for group in groups]
        self.optimizer = torch.optim.AdamW(main_groups, **kwargs)

    def backward(self, *steps):
        total = [None] * len(self.params)
        for rank in range(self.world_size):
            local = [None] * len(self.params)
            for step in steps:
                grads = torch.autograd.grad(loss_of(self.model, *batch(step, rank)), self.params)
                grads = [grad.to(self.grad_dtype or grad.dtype) for grad in grads]
                local = [grad if sum_ is None else sum_ + grad for grad, sum_ in zip(grads, local)]
            shares = [grad / self.world_size for grad in local]
            total = [share if sum_ is None else sum_ + share for share, sum_ in zip(shares, total)]
        for param, grad in zip(self.params, total):
            self.main[param].grad = grad.float()

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for param, main in self.main.items():
            param.copy_(main)


def assert_close(model, reference, exact):
    """To the bit on one or two ranks. On more, the order of a sum is gloo's, and with reentrant checkpointing a tied
    weight's two gradients are added one by one: a 16-bit gradient may be rounded another way. Where it is close to zero
    AdamW makes of that a step of up to lr in another direction."""
    for (name, param), expected in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        difference = (param - expected[1]).abs().float()
        if exact:
            assert torch.equal(param, expected[1]), (name, difference.max())
        else:
            assert difference.max() <= 2 * ADAMW["lr"] and difference.mean() <= ADAMW["lr"], (name, difference)


def two_groups(model):
    named = list(model.named_parameters())
    matrices = [param for _, param in named if param.requires_grad and param.dim() > 1]
    vectors = [param for _, param in named if param.requires_grad and param.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "lr": 0.003, "weight_decay": 0.0}]


@on_its_device
def trains_like_rounded(rank, row, how):
    dtype, grad_dtype = ROWS[row]
    model, same = Mixed(seed=rank.rank, dtype=dtype, how=how), Mixed(seed=0, dtype=dtype)
    reference = Rounded(same, rank.world_size, grad_dtype, groups=two_groups, **ADAMW)
    optimizer = DistributedOptimizer(two_groups(model), grad_dtype=grad_dtype, **ADAMW)
    schedules = [SCHEDULERS["LinearLR"](o) for o in (optimizer, reference.optimizer)]
    for step in range(4):
        micro_batches = [2 * step, 2 * step + 1] if step % 2 else [2 * step]

        def closure():
            for micro in micro_batches:
                with optimizer.no_sync():
                    loss = loss_of(model, *batch(micro, rank.rank))
                    loss.backward()
            return loss

        optimizer.step(closure)
        reference.backward(*micro_batches)
        reference.step()
        for schedule in schedules:
            schedule.step()
        assert_close(model, same, exact=rank.world_size <= 2 and how != "reentrant")
    kinds = {buffer.flat.dtype for buffer in optimizer.buffers}
    assert kinds == {grad_dtype or dtype, torch.float32}  # one buffer for each pair of dtypes


@pytest.mark.parametrize("how", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("row", ROWS)
def test_equals_replicated_main_parameters_that_round_alike(run, row, how):
    run(trains_like_rounded, row, how)


@on_its_device
def clips_like_torch(rank, row, norm_type):
    dtype, grad_dtype = ROWS[row]
    model, same = Mixed(seed=0, dtype=dtype), Mixed(seed=0, dtype=dtype)
    reference = Rounded(same, rank.world_size, grad_dtype, **ADAMW)
    optimizer = DistributedOptimizer(trainable(model), grad_dtype=grad_dtype, **ADAMW)
    loss_of(model, *batch(0, rank.rank)).backward()
    reference.backward(0)
    norm = optimizer.clip_grad_norm_(0.01, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(reference.main.values(), 0.01, norm_type)
    assert torch.allclose(norm, expected, rtol=1e-5 if rank.world_size <= 2 else 2**-7), (norm, expected)
    optimizer.step()
    reference.step()
    assert_close(model, same, exact=False)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
@pytest.mark.parametrize("row", ROWS)
def test_clipping_has_the_norm_of_the_whole_model(run, row, norm_type):
    run(clips_like_torch, row, norm_type)


# ------------------------------------------------------------------------------------------------------- GradScaler


@on_its_device
def scaled(rank, stage, row, explode, unscale):
    """Four steps under a GradScaler; in the second, rank `explode` has an inf. -> scale, parameters, step counts."""
    dtype, grad_dtype = ROWS[row]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Linear(11, 7)).to(dtype)
    kwargs = {"grad_dtype": grad_dtype} if stage == "stage3_gradbuffer" else {}
    optimizer = optimizer_of(stage)(model.parameters(), **kwargs, **ADAMW)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=2.0**6, growth_interval=1000)
    history = []
    for step in range(4):
        x, y = batch(step, rank.rank)
        loss = (model(x.to(dtype)).float() - y).square().mean()
        if step == 1 and rank.rank == explode:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale == "and mend":
            scaler.unscale_(optimizer)
            for param in model.parameters():
                param.grad.nan_to_num_(0, 0, 0)
        elif unscale:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e6)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        counts = {int(state["step"]) for state in optimizer.state.values()}
        history.append((scaler.get_scale(), counts, [param.detach().float().clone() for param in model.parameters()]))
    return history


CASES = [(stage, "fp32/fp32", unscale) for stage in STAGES[:3] for unscale in (False, True, "and mend")]
CASES += [("stage4_overlap", "fp32/fp32", False)]
CASES += [("stage3_gradbuffer", row, False) for row in ("fp16/fp16", "fp16/fp32")]


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("stage, row, unscale", CASES)
def test_an_inf_on_one_rank_skips_the_step_on_every_rank(run, stage, row, unscale):
    histories = run(scaled, stage, row, 1, unscale)
    for history in histories:
        scales, counts, params = zip(*history)
        assert scales == (64.0, 32.0, 32.0, 32.0)
        assert [max(count, default=0) for count in counts] == [1, 1, 2, 3]  # steps that were taken
        assert all(torch.equal(a, b) for a, b in zip(params[0], params[1]))  # the second step was skipped
        assert not all(torch.equal(a, b) for a, b in zip(params[1], params[2]))
        assert all(torch.equal(a, b) for a, b in zip(params[3], histories[0][3][2]))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_unscaled(run, stage):
    """A scale that is a power of two leaves no trace: the same bits as without a scaler."""
    with_scaler = run(scaled, stage, "fp32/fp32", None, False)[0]
    for (_, _, params), expected in zip(with_scaler, run(unscaled_run, stage)[0]):
        assert all(torch.equal(a, b) for a, b in zip(params, expected))


@on_its_device
def unscaled_run(rank, stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Linear(11, 7))
    optimizer, history = optimizer_of(stage)(model.parameters(), **ADAMW), []
    for step in range(4):
        x, y = batch(step, rank.rank)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append([param.detach().clone() for param in model.parameters()])
    return history


@on_its_device
def unscale_without_grads(rank):
    model = torch.nn.Linear(7, 7, dtype=torch.float16)
    optimizer = DistributedOptimizer(model.parameters(), grad_dtype=torch.float32)
    scaler = torch.amp.GradScaler(rank.device.type)
    scaler.scale(model(torch.ones(2, 7, dtype=torch.float16)).sum()).backward()
    scaler.unscale_(optimizer)  # sees no param.grad: clipping would use scaled gradients
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)


@on_its_device
def unscale_fp32_only(rank):
    """unscale_ finds the gradient of the fp32 parameter, and not that of the other one, which is in main_grad."""
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = DistributedOptimizer(params, torch.optim.SGD, lr=0.1, grad_dtype=torch.float32)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=1024.0)
    scaler.scale(sum(param.float().sum() for param in params)).backward()
    scaler.unscale_(optimizer)
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)


@on_its_device
def unscale_some(rank):
    """One pass whose gradients have left, and one inside no_sync, whose gradients unscale_ finds."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = optimizer_of(STAGES[3])(params, torch.optim.SGD, lr=0.1, find_unused_parameters=True)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=1024.0)
    scaler.scale(params[0].sum()).backward()
    with optimizer.no_sync():
        scaler.scale(params[1].sum()).backward()
    scaler.unscale_(optimizer)
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)


@on_its_device
def unscale_on_rank_0(rank, stage):
    """On the other rank there is nothing to unscale."""
    param = torch.nn.Parameter(torch.zeros(4))
    unused = {"find_unused_parameters": True} if stage == STAGES[3] else {}
    optimizer = optimizer_of(stage)([param], torch.optim.SGD, lr=1.0, **unused)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=1024.0)
    loss = scaler.scale(param.sum())
    if rank.rank == 0:
        with optimizer.no_sync():
            loss.backward()
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_(100.0)
    scaler.step(optimizer)
    return param.tolist()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("wrong", [unscale_fp32_only, unscale_some])
def test_unscale_that_sees_some_gradients_is_refused(run, world_size, wrong):
    assert all("clip_grad_norm_(max_norm * scaler.get_scale())" in message for message in run(wrong))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", STAGES)
def test_unscale_on_a_rank_that_has_no_gradient(run, stage, world_size):
    assert run(unscale_on_rank_0, stage) == [[-0.5] * 4] * 2


@on_its_device
def unscale_without_a_pass(rank):
    """Gradients have left on rank 0; the other ranks had none, and must hear of it."""
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = optimizer_of(STAGES[3])([param], torch.optim.SGD, lr=1.0, find_unused_parameters=True)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=1024.0)
    loss = scaler.scale(param.sum())
    if rank.rank == 0:
        loss.backward()
    scaler.unscale_(optimizer)
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_unscale_is_refused_on_every_rank(run, world_size):
    messages = run(unscale_without_a_pass)
    assert all("clip_grad_norm_(max_norm * scaler.get_scale())" in message for message in messages)


@pytest.mark.parametrize("world_size", [2])
def test_unscale_that_sees_no_gradient_is_refused(run):
    assert all("clip_grad_norm_(max_norm * scaler.get_scale())" in message for message in run(unscale_without_grads))


# ----------------------------------------------------------------------------------------------------------- memory


def allocations(row, clip, device="cpu", rank=0):
    """-> bytes that the third step makes, and those of the largest buffer."""
    dtype, grad_dtype = ROWS[row]
    model = Mixed(seed=0, dtype=dtype).to(device)
    optimizer = DistributedOptimizer(trainable(model), grad_dtype=grad_dtype, lr=0.1, fused=True)
    with Memory(device) as memory:
        for step in range(3):
            loss_of(model, *batch(step, rank, device=device)).backward()
            if clip:
                optimizer.clip_grad_norm_(1.0)
            before = memory.settled()  # gloo's thread may still hold the copy of the step before
            memory.reset_peak()
            optimizer.step()
            made = memory.peak - before
            optimizer.zero_grad()
    return made, max(buffer.flat.nbytes for buffer in optimizer.buffers)


def on_ranks(rank, row, clip):
    """-> bytes that a step makes, and how many gloo's reduce-scatter has to."""
    made, largest = allocations(row, clip, rank.device, rank.rank)
    return made, largest if rank.backend == "gloo" else 0


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("d", [1, 2, 64])
@pytest.mark.parametrize("row", ROWS)
def test_a_step_allocates_nothing(row, d, clip):
    """After the first one, which makes the state: not a byte."""
    with one_rank_of(d):
        assert allocations(row, clip)[0] == 0


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("row", ROWS)
def test_on_gloo_there_is_the_copy_in_which_it_reduces_and_nothing_else(run, row):
    for made, copied in run(on_ranks, row, clip=False):
        assert made == copied


def model_state_bytes(d, row):
    dtype, grad_dtype = ROWS[row]
    with one_rank_of(d), Memory("cpu") as memory:
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, dtype=dtype) for _ in range(6)))
        optimizer = DistributedOptimizer(model.parameters(), grad_dtype=grad_dtype, lr=0.1, fused=True)
        for _ in range(2):
            model(torch.ones(1, 1024, dtype=dtype)).sum().backward()
            optimizer.step()
        return memory.live / sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("row", ROWS)
def test_a_step_sends_g_plus_p_bytes_a_parameter(row):
    """One reduce-scatter of gradients and one all-gather of parameters for each buffer, each (d-1)/d of its size."""
    dtype, grad_dtype = ROWS[row]
    with one_rank_of(4):
        model = Mixed(seed=0, dtype=dtype)
        optimizer = DistributedOptimizer(trainable(model), grad_dtype=grad_dtype, lr=0.1, fused=True)
        loss_of(model, *batch(0, 0)).backward()
        with Ledger() as ledger:
            optimizer.step()
    sent = sum(buffer.flat.nbytes + buffer.flat_params.nbytes for buffer in optimizer.buffers) * 3 / 4
    assert ledger.wire_bytes == sent
    assert ledger.collectives == {"reduce_scatter": len(optimizer.buffers), "all_gather": len(optimizer.buffers)}


FORMULAS = {16: lambda d: 4 + 16 / d, 24: lambda d: 6 + 12 / d, 32: lambda d: 8 + 8 / d}


@pytest.mark.parametrize("d", [1, 2, 4, 8, 64, 1024])
@pytest.mark.parametrize(
    "row, formula",
    [("bf16/bf16", 16), ("fp16/fp16", 16), ("bf16/fp32", 24), ("fp16/fp32", 24), ("fp32/fp32", 32)],
)
def test_bytes_a_parameter_are_those_of_the_formula(d, row, formula):
    assert model_state_bytes(d, row) == pytest.approx(FORMULAS[formula](d), rel=0.01)


@on_its_device
def other_dtypes(rank, dtypes, grad_dtype):
    params = [torch.nn.Parameter(torch.full((5,), rank.rank + 1.0, dtype=dtype)) for dtype in dtypes]
    with pytest.raises(ValueError) as error:
        DistributedOptimizer(params, grad_dtype=grad_dtype)
    assert all(param.eq(rank.rank + 1).all() for param in params)  # rank 0 has broadcast nothing yet
    optimizer = DistributedOptimizer([torch.nn.Parameter(torch.ones(5, dtype=grad_dtype))], grad_dtype=grad_dtype)
    with pytest.raises(ValueError, match="of group 1 is .* can't be kept in"):
        optimizer.add_param_group({"params": params})
    return str(error.value)


F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("dtypes, grad_dtype", [([F32], B16), ([B16], F64), ([F16], B16), ([F16, F64], F32)])
def test_a_grad_dtype_that_the_buffer_cannot_take_is_refused(run, world_size, dtypes, grad_dtype):
    place, dtype = len(dtypes) - 1, dtypes[-1]
    for message in run(other_dtypes, dtypes, grad_dtype):
        assert f"parameter {place} of group 0 is {dtype}: its gradients can't be kept in {grad_dtype}" in message


@on_its_device
def written_past_hooks(rank):
    """SGD by hand: a gradient that is written into the view, and one of a layer that was frozen at first."""
    params = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
    params[1].requires_grad_(False)
    optimizer = DistributedOptimizer(params, torch.optim.SGD, lr=1.0)
    params[0].grad.fill_(7)
    optimizer.zero_grad()
    params[1].requires_grad_(True)
    optimizer.zero_grad()
    params[1].sum().backward()
    optimizer.zero_grad()
    sum(param.sum() for param in params).backward()
    optimizer.step()
    return [param.tolist() for param in params]


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_forgets_what_came_past_every_hook(run, world_size):
    assert all(found == [[-1.0] * 5] * 2 for found in run(written_past_hooks))


@on_its_device
def changed_after_sync(rank, dtype, change):
    """Stage 3: 16-bit gradients have been copied to fp32 ones by then, fp32 ones are the buffer's own."""
    weight = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
    optimizer = DistributedOptimizer([weight], torch.optim.SGD, lr=1.0)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=4.0)
    scaler.scale((weight * 5).sum()).backward()
    optimizer.finish_grad_sync()
    if change == "unscale":
        scaler.unscale_(optimizer)
    else:
        torch.nn.utils.clip_grad_value_([weight], 0.5)
    scaler.step(optimizer)
    return weight.unique().tolist()


def refused_after_sync(rank):
    with pytest.raises(RuntimeError, match="16-bit gradients were changed after finish_grad_sync"):
        changed_after_sync(rank, torch.bfloat16, "clip")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("change, expected", [("unscale", -5.0), ("clip", -0.125)])
def test_a_change_of_gradients_after_their_synchronization(run, change, expected):
    assert all(found == [expected] for found in run(changed_after_sync, torch.float32, change))
    run(refused_after_sync)


@on_its_device
def padding_stays_zero(rank, row):
    dtype, grad_dtype = ROWS[row]
    model = Mixed(seed=0, dtype=dtype)
    optimizer = DistributedOptimizer(trainable(model), grad_dtype=grad_dtype, **ADAMW)
    for step in range(3):
        loss_of(model, *batch(step, rank.rank)).backward()
        for buffer in optimizer.buffers:
            around = padding(buffer.flat, [(grad.storage_offset(), grad.numel()) for grad in buffer.grads])
            assert buffer.flat.numel() % (rank.world_size * 16) == 0 and len(around) and around.eq(0).all()
        optimizer.finish_grad_sync()
        for buffer in optimizer.buffers:
            assert padding(buffer.grad_shard, [(r.offset, r.stop - r.start) for r in buffer.ranges]).eq(0).all()
        optimizer.step()


@pytest.mark.parametrize("row", ["bf16/bf16", "bf16/fp32", "fp32/fp32"])
def test_padding_is_zero_and_stays_zero(run, row):
    run(padding_stays_zero, row)


def test_net_is_what_the_contract_says():
    """Tied, frozen, scalar and odd-sized parameters are really in the model that everything is tried on."""
    model = Net(seed=0)
    assert model.tied.weight is model.up.weight and not model.frozen.weight.requires_grad and model.scale.dim() == 0
    assert all(param.numel() % 2 for param in (model.embed.weight, model.up.weight, model.scale))
