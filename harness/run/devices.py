"""Where a rank computes and how it talks: the one place where backend and device are chosen, and tried."""

import os
import platform

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: as a default of its functions that would never end

from harness.run.processor import keep_freed_memory


def choices(local_rank, local_world_size):
    """The one place where backend and device are chosen -> [(backend, device), …], to be tried in this order.

    One GPU a rank with NCCL, or everything on the CPU. With fewer GPUs than ranks, these share them if that works:
    NCCL refuses two ranks on one GPU of one host, but not if each says, by NCCL_HOSTID, that it is a host of its own;
    they then talk through sockets. gloo has collectives for CUDA tensors, in some releases all that are needed here.
    SHARE_GPU=no in the environment leaves the GPUs alone unless there is one for each rank.
    """
    n_gpus, cpu = torch.cuda.device_count() if torch.cuda.is_available() else 0, ("gloo", torch.device("cpu"))
    if n_gpus >= local_world_size and dist.is_nccl_available():
        return [("nccl", torch.device("cuda", local_rank))]
    if not n_gpus or os.environ.get("SHARE_GPU") == "no":
        return [cpu]
    os.environ["NCCL_HOSTID"] = f"{platform.node()} rank {local_rank}"
    shared = torch.device("cuda", local_rank % n_gpus)
    return [*[("nccl", shared)] * dist.is_nccl_available(), ("gloo", shared), cpu]


def prepare(device):
    """Settings of this process for tensors on `device`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    keep_freed_memory()
    # More threads than one would make ranks on the same machine fight for its cores.
    n_threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is of nested levels
    torch.set_num_threads(int(n_threads) if n_threads.isdecimal() and int(n_threads) else 1)


def works(device, store):
    """Whether what the stages call works on `device` in the default group, on every rank; they tell by `store`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        ones, one = torch.ones(world_size, device=device), torch.ones(1, device=device)
        dist.all_reduce(ones)
        dist.broadcast(ones, src=0)
        dist.all_gather_into_tensor(ones, one)
        dist.reduce_scatter_tensor(one, ones)
        neighbours = [(dist.isend, ones, (rank + 1) % world_size), (dist.irecv, ones.clone(), (rank - 1) % world_size)]
        operations = [dist.P2POp(*neighbour) for neighbour in neighbours if world_size > 1]  # nobody sends to itself
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        answer = str(one.item())
    except RuntimeError as refusal:
        answer = str(refusal)
    store.set(str(rank), answer)
    return all(store.get(str(other)).decode() == str(float(world_size)) for other in range(world_size))
