"""Trains a small model on two ranks of this machine, and beside them in one process that gets the batches of both.

    python -m my_optimizer.smoke_test

The parameters must come out the same, up to rounding. A rank is a process that trains on a part of each batch.
"""

import tempfile

import torch
import torch.distributed as dist

from . import DistributedOptimizer

N_RANKS = 2


def trained(make_optimizer, batches):
    """Return the parameters of a model that was trained for one step on each batch.

    make_optimizer: called like DistributedOptimizer, as in make_optimizer(params, torch.optim.AdamW, lr=1e-2).
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = make_optimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for x in batches:
        torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def alone(params, optimizer_cls, **options):
    """Take the arguments of DistributedOptimizer, and return the plain optimizer, which sends nothing."""
    return optimizer_cls(params, **options)


def compare(rank, path):
    """Be rank number `rank`: train together with the other ranks and alone, and compare.

    The ranks find each other through the file `path`. Raises AssertionError if the parameters differ.
    """
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=N_RANKS)
    batches = torch.randn(5, N_RANKS, 8, 16, generator=torch.Generator().manual_seed(0))  # (steps, ranks, 8, 16)
    of_rank = trained(DistributedOptimizer, batches[:, rank])  # on this rank's part of each batch
    # Flattened, a batch is the batches of all ranks, one behind the other: (steps, ranks * 8, 16).
    torch.testing.assert_close(of_rank, trained(alone, batches.flatten(1, 2)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(compare, (f"{folder}/meeting",), nprocs=N_RANKS)
    print(f"{N_RANKS} ranks have trained as one process does")
