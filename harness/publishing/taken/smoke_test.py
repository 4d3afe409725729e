"""Trains a small model on two ranks of this machine, and compares it with one process that has the batches of both.

    python -m my_optimizer.smoke_test
"""

import tempfile

import torch
import torch.distributed as dist

from . import DistributedOptimizer

N_RANKS = 2


def trained(make_optimizer, batches):
    """Return the parameters of a model after a step per batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = make_optimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for x in batches:
        torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def alone(params, optimizer_cls, **options):
    return optimizer_cls(params, **options)


def compare(rank, path):
    """Train on rank `rank` of N_RANKS that meet in the file `path`. Raises AssertionError if the parameters differ."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=N_RANKS)
    batches = torch.randn(5, N_RANKS, 8, 16, generator=torch.Generator().manual_seed(0))  # (steps, ranks, 8, 16)
    of_rank = trained(DistributedOptimizer, batches[:, rank])
    torch.testing.assert_close(of_rank, trained(alone, batches.flatten(1, 2)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(compare, (f"{folder}/meeting",), nprocs=N_RANKS)
    print(f"{N_RANKS} ranks have trained as one process does")
