"""What users write, for the type checker alone: nothing here is run. `make check` reads it.

A line with `type: ignore` is a mistake that mypy must see: where it sees none, it says that the comment is unused.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import checkpoint


def saves_and_loads(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saving: Future[None] = checkpoint.save("runs/step-1", model, optimizer, {"step": 1}, asynchronous=True)
    saving.result()
    newest: Path | None = checkpoint.latest(Path("runs"))
    if newest is not None:
        extra: Any = checkpoint.load(newest, model, optimizer)
        print(extra["step"])
    checkpoint.load(newest, model, optimizer)  # type: ignore[arg-type]
    checkpoint.save("runs/step-1", optimizer, model)  # type: ignore[arg-type]
    checkpoint.latest(3)  # type: ignore[arg-type]


def takes_the_state_along(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    state: dict[str, Any] = checkpoint.full_state_dict(optimizer, to_all=True)
    checkpoint.load_full_state_dict(optimizer, state)
    checkpoint.load_full_state_dict(optimizer, None)
    checkpoint.reshard(optimizer, group)
    checkpoint.reshard(optimizer, None)
    checkpoint.full_state_dict(optimizer, to_all="all")  # type: ignore[arg-type]
    checkpoint.load_full_state_dict(optimizer, [state])  # type: ignore[arg-type]
    checkpoint.reshard(optimizer, [0, 1])  # type: ignore[arg-type]
