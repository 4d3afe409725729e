"""Stage 4: each backward pass sends all buckets once, on every rank, whatever the passes are like.

A rank that sends them more often than another waits for ever: there are two buffers, so the third bucket can't be sent
before the first one has arrived.
"""

import contextlib
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from harness import STAGE_3, STAGE_4
from stage4_overlap import rounds
from tests.common import Net, batch, error_of, loss_of, no_sync_if, on_ranks, optimizer_of, trainable
from tests.pairs import SMALL, parameter_of, sgd_of


def zero_params_and_sgd(rank, **kwargs):
    """Make six parameters of five zeros, a bucket each, and SGD with a learning rate of 1."""
    params = [parameter_of(0, rank) for _ in range(6)]
    return params, sgd_of(STAGE_4, params, **SMALL, **kwargs)


def backward(params):
    """Run the backward pass of the sum of `params`."""
    sum(param.sum() for param in params).backward()


def moved_by(params, grads):
    """Return whether each of `params` has moved by minus its mean gradient. `grads`: a list of numbers per rank."""
    expected = -torch.tensor(grads, dtype=torch.float32).mean(dim=0)
    return torch.allclose(torch.stack([param.detach().cpu()[0] for param in params]), expected)


# ------------------------------------------------------------------------ a step that is given up, and what follows it


@on_ranks
def test_a_step_that_is_given_up_changes_nothing_and_training_goes_on(rank):
    """Drop gradients that rank 0 has accumulated and the others have sent. Assign one too late: an error. Train on."""
    params, optimizer = zero_params_and_sgd(rank)
    with no_sync_if(optimizer, rank.number == 0):
        backward(params)
    optimizer.zero_grad()
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        backward(params)
        assert all(param.grad is not None for param in params)  # the inner no_sync() hasn't ended the outer one
    backward(params)  # sends the accumulated gradients too, so the next one was assigned by a user
    params[3].grad = torch.full_like(params[3], 100.0)
    assert "the gradient of parameter 3 of group 0 was assigned after" in error_of(optimizer.step)
    assert moved_by(params, [[0] * 6])
    with no_sync_if(optimizer, rank.number == 0):
        backward(params)
    optimizer.step()
    assert moved_by(params, [[1] * 6])


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


@on_ranks(checkpointed=[False, True])
def test_passes_after_one_that_failed(rank, checkpointed):
    """Raise in a backward pass on every rank, and train on. The gradients that it has computed count, as in torch.

    Rank 0 has computed all of them by then, and uses all in the second pass. The other ranks have computed the last
    one, and use the first one in the second pass. `loss` stays alive, and with it the graph that has failed.
    """
    params, optimizer = zero_params_and_sgd(rank, find_unused_parameters=True)
    leaf, factor = (torch.ones((), device=rank.device, requires_grad=True) for _ in range(2))
    failing = Fail.apply(leaf)  # the first operator of the forward pass is the last one of the backward pass
    used_at_first = params if rank.number == 0 else params[5:]
    used_then = params if rank.number == 0 else params[:1]

    def loss_of_used(factor):
        return sum(param.sum() for param in used_at_first) * factor

    later = checkpoint(loss_of_used, factor, use_reentrant=True) if checkpointed else loss_of_used(factor)
    loss = failing + later
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    backward(used_then)
    dist.all_reduce(torch.ones((), device=rank.device))
    optimizer.step()
    of_rank_0 = [2] * 6
    of_others = [1, 0, 0, 0, 0, 1]
    assert moved_by(params, [of_rank_0] + [of_others] * (rank.world_size - 1))


# ------------------------------------------------------------------------------------ a step that waits for no device


READS_A_VALUE = {getattr(torch.Tensor, name) for name in (
    "item", "tolist", "cpu", "nonzero", "equal", "allclose", "__bool__", "__int__", "__float__")}
READS_A_VALUE |= {torch.equal, torch.allclose, torch.nonzero}


class OnADevice(TorchFunctionMode):
    """Pretend that tensors are on a GPU, with NCCL: raise where Python reads a value, because that would wait.

    With --gpu torch itself raises. A tensor made by torch.tensor(…) counts as one of the host, which no all-reduce of
    the GPUs' group may write.
    """

    def __enter__(self):
        self.host_tensors = {}  # id -> tensor
        self.host_groups = weakref.WeakKeyDictionary()  # process group -> the gloo group that rounds.py made for it
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(mock.patch.object(rounds, "backends_of", lambda _: {"cuda": "nccl"}))
        self.patches.enter_context(mock.patch.object(rounds, "HOST_GROUPS", self.host_groups))
        self.patches.enter_context(mock.patch.object(dist, "all_reduce", side_effect=AssertionError))
        if torch.cuda.is_available():
            self.patches.callback(torch.cuda.set_sync_debug_mode, "default")
            torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS_A_VALUE and not torch.cuda.is_available() and id(args[0]) not in self.host_tensors:
            raise AssertionError(f"{function.__name__} waits for the device")
        result = function(*args, **(kwargs or {}))
        if function is torch.tensor:
            self.host_tensors[id(result)] = result
        return result


@on_ranks(2, stage=[STAGE_3, STAGE_4])
def test_no_step_waits_for_the_device(rank, stage):
    """Train as on a GPU, where the process group is NCCL's: the host runs ahead, and a CUDA graph can take the step.

    Accumulate two micro-batches of 16 bits in each step, the first of which uses a single parameter. Stage 4 makes a
    group of gloo for the hosts. Rank 0 is in one group more, so new_group() would name the groups differently.
    """
    if rank.number == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    model = Net(seed=0).to(torch.bfloat16)
    params = trainable(model)
    own = {"find_unused_parameters": True} if stage == STAGE_4 else {}
    optimizer = optimizer_of(stage)(params, lr=0.01, fused=True, **own)
    if stage == STAGE_4:
        optimizer.prefetch_params(model)
    before = [param.detach().clone() for param in params]
    batches = [[values.bfloat16() for values in batch(step, rank.number)] for step in range(3)]
    with OnADevice() as device:
        for step, (x, y) in enumerate(batches):
            with no_sync_if(optimizer, step == 0):
                model.scale.square().backward()
            loss_of(model, x, y).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert not any(map(torch.equal, before, params))
    backends = [group.name() for group in device.host_groups.values()]
    assert backends == (["gloo"] if stage == STAGE_4 else [])
