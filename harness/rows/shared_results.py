"""What is kept of a row of bench.py --tp: tensor-parallel ranks."""

from dataclasses import dataclass, field


@dataclass
class SharedRow:
    """Of a model whose layers are shared by `tp` ranks each. Bytes are of a rank and a step: sent among data-parallel
    and among tensor-parallel ranks, held after a step by kind. `ddp_ms`: DDP's, in the same rounds.
    """
    name: str
    tp: int
    error: str | None = None
    rounds_ms: list[float] = field(default_factory=list)
    ddp_ms: list[float] = field(default_factory=list)
    max_abs_diff: float | None = None
    dp_bytes: int | None = None
    tp_bytes: int | None = None
    held_bytes: dict[str, int] = field(default_factory=dict)
    activation_bytes: int | None = None
    peak_bytes: int | None = None
