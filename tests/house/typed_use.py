"""What users write, for the type checker alone: nothing here is run. `make check` reads it.

A line with `type: ignore` is a mistake that mypy must see: where it sees none, it says that the comment is unused.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import checkpoint
from stage1_naive_broadcast import DistributedOptimizer as Stage1
from stage4_overlap import DistributedOptimizer as Stage4


def saves_and_loads(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saving: Future[None] = checkpoint.save("runs/step-1", model, optimizer, {"step": 1}, asynchronous=True)
    newest: Path | None = checkpoint.latest(Path("runs"))
    extra: Any = checkpoint.load(newest or "runs/step-1", model, optimizer)
    print(saving, extra["step"])
    checkpoint.load(newest, model, optimizer)  # type: ignore[arg-type]
    checkpoint.save("runs/step-1", optimizer, model)  # type: ignore[arg-type]


def takes_the_state_along(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    state: dict[str, Any] = checkpoint.full_state_dict(optimizer, to_all=True)
    checkpoint.load_full_state_dict(optimizer, state)
    checkpoint.load_full_state_dict(optimizer, None)
    checkpoint.reshard(optimizer, group)
    checkpoint.reshard(optimizer, None)
    checkpoint.reshard(optimizer, [0, 1])  # type: ignore[arg-type]


def trains(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    optimizer = Stage4(model.parameters(), torch.optim.AdamW, process_group=group, bucket_cap_mb=8, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    optimizer.prefetch_params(model)
    with optimizer.no_sync():
        model(torch.ones(2, 3)).sum().backward()
    norm: torch.Tensor = optimizer.clip_grad_norm_(1.0)
    print(norm.item())
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    Stage1([{"params": [torch.ones(3)], "lr": 0.1}], torch.optim.SGD, average_gradients=False)
    Stage4(model.parameters(), bucket_cap_mb="8")  # type: ignore[arg-type]
    Stage4(3)  # type: ignore[arg-type]
    Stage1(model.parameters(), average_gradients="no")  # type: ignore[arg-type]
    optimizer.prefetch_params(3)  # type: ignore[arg-type]
    optimizer.clip_grad_norm_("much")  # type: ignore[arg-type]
    optimizer.no_such_method()  # type: ignore[attr-defined]
