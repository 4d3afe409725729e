"""Holds what the tests share: a model that is awkward to shard, data, and the decorator `on_ranks`."""

import contextlib
import functools
import gc
import importlib
import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.debug
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from harness import STAGES as STAGES
from harness.ranks.meeting import join, rank_0_of
from stage4_overlap import drops

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def optimizer_of(stage):
    """Return the DistributedOptimizer of the package `stage`."""
    package = importlib.import_module(stage)
    if not hasattr(package, "DistributedOptimizer"):
        package = importlib.import_module(f"{stage}.optimizer")
    return package.DistributedOptimizer


class Net(nn.Module):
    """A model with tied, frozen, scalar and odd-sized parameters: 208 elements to train, 1, 5, 11, 35 or 55 in each."""

    def __init__(self, seed, frozen_seed=0):
        super().__init__()
        torch.manual_seed(frozen_seed)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        torch.manual_seed(seed)
        self.embed = nn.Linear(7, 5, bias=False)
        self.up = nn.Linear(5, 11)
        self.down = nn.Linear(11, 5)
        self.scale = nn.Parameter(torch.rand(()))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = nn.Parameter(torch.rand(7, 5))
        self.tied = nn.Linear(5, 11)
        self.tied.weight = self.up.weight

    def forward(self, x):  # (batch, 7) -> (batch, 7)
        x = self.embed(x)
        x = x + self.down(torch.tanh(self.up(x))) * self.scale
        x = x + self.down(torch.tanh(self.tied(x)))
        return self.head(x) + self.frozen(x).sum(dim=1, keepdim=True)


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def on_its_device(function):
    """Let `function(rank, ...)` make tensors on the rank's device, unless it names another one."""
    @functools.wraps(function)
    def wrapper(rank, *args, **kwargs):
        with rank.device if rank.device.type != "cpu" else contextlib.nullcontext():
            return function(rank, *args, **kwargs)
    return wrapper


def of_cpus(rank):
    """Return the same rank with the CPU as its device, and a group of gloo, for tests of a CPU's order of events."""
    group = None if rank.backend == "gloo" else dist.new_group(backend="gloo")
    return rank._replace(device=torch.device("cpu"), backend="gloo"), group


def batch(step, rank, size=4, device=None):
    """Return [x, y], (size, 7) each. Each step and rank has a batch of its own, the same in every call."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    device = device or torch.get_default_device()
    return [torch.randn(size, 7, generator=generator, device="cpu").to(device) for _ in range(2)]


def loss_of(model, x, y):
    return F.mse_loss(model(x), y)


one_rank_of = rank_0_of  # plays rank 0 of d: the real code runs, and nothing is sent


# ------------------------------------------------------------------------------------- how a test of stages is written


def on_ranks(*world_sizes, **situations):
    """Run the decorated test on each rank, which is its first argument. Without world sizes tests/plugin.py gives them.

    `situations`: {argument: its values}. One test plays all combinations one after the other, because each takes a
    moment; a failure names its combination.
    """
    if world_sizes and callable(world_sizes[0]):  # @on_ranks without brackets
        return on_ranks()(world_sizes[0])

    def decorate(body):
        names = ["run", "world_size", *(name for name in inspect.signature(body).parameters if name not in situations)]
        names.remove("rank")

        @functools.wraps(body)
        def test(run, world_size, **kwargs):
            run(play_situations, body.__module__, body.__name__, kwargs)

        test.situations = situations
        test.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                                                for name in names])
        return pytest.mark.parametrize("world_size", world_sizes)(test) if world_sizes else test
    return decorate


def play_situations(rank, module, name, kwargs):
    """Run the body of the test `name` of `module` in each of its situations."""
    test = getattr(importlib.import_module(module), name)
    for values in itertools.product(*test.situations.values()):
        played = dict(zip(test.situations, values))
        with situation(played) if played else contextlib.nullcontext():
            test.__wrapped__(rank, **kwargs, **played)


def in_groups_of_its_own(rank, function, *args, **kwargs):
    """Call `function(rank, ...)`, and end all process groups that it has made: an idle group wakes 77 times a second.

    Caches keep a group as long as the group of all ranks lives. So that group ends, too, and the ranks meet anew. The
    ranks agree on this, because one may have made a group that another has not.
    """
    result = function(rank, *args, **kwargs)
    n_groups = torch.tensor(len(dist.distributed_c10d._world.pg_map), device=rank.device)
    dist.all_reduce(n_groups, dist.ReduceOp.MAX)
    if n_groups > 1:
        meet_anew(rank)
    return result


@functools.cache  # until the ranks meet anew: if one rank made a mesh again, it would wait for the others
def mesh_of(device_type, shape, names=None):
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


N_MEETINGS = itertools.count()  # a prefix for each, because the store still has the addresses of ended groups


def meet_anew(rank):
    """End all process groups of this rank, and join a new one of the same ranks. Collective."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    dist.destroy_process_group()
    # A group has threads until its last reference is gone. A bare core has a reference, and is in a cycle that the
    # garbage collector doesn't see: a parameter has a hook of the core, which has the parameter. Caches of torch keep
    # meshes.
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Parameter):
            (thing._post_accumulate_grad_hooks or {}).clear()
        elif type(thing) is DeviceMesh:
            thing._pg_registry.clear()
    mesh_of.cache_clear()
    torch.distributed.tensor.debug._clear_sharding_prop_cache()  # its meshes equal those that are made next
    drops.UNDER_WAY.clear()  # messages of stage 4's optimizers that a test has dropped
    gc.collect()
    gc.freeze()  # the next collection is quick
    store = dist.PrefixStore(f"meeting {next(N_MEETINGS)}", store)
    join(rank.number, rank.world_size, rank.number, rank.world_size, 300, store)  # as if all ranks were on one host


def no_sync_if(optimizer, condition):
    """Return the optimizer's no_sync() if `condition`, or a context that does nothing."""
    return optimizer.no_sync() if condition else contextlib.nullcontext()


@contextlib.contextmanager
def situation(name):
    """Name the situation in the error of a test that plays several."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__} {error}") from error


def error_of(function, *exceptions):
    """Return the message of the error that `function` must raise, which must be one line."""
    exceptions = exceptions or (RuntimeError,)
    try:
        function()
    except exceptions as error:
        assert str(error) and "\n" not in str(error)
        return str(error)
    raise AssertionError("no error")
