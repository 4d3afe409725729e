"""What is kept of make cuda."""

from dataclasses import dataclass, field

from harness.rows.results import HostRow


@dataclass
class GpuConditions:
    machine: str
    torch: str
    dtype: str
    steps: int
    copy_bytes_per_s: float
    date: str
    commit: str | None = None


@dataclass
class GpuRow:
    """`stage`: a package, or "fused AdamW". What torch's allocator handed out, and took for that: None on a CPU.

    An out-of-memory is a result as well: `error`, and no figures.
    """
    stage: str
    model: str
    d: int
    step_ms: float | None = None
    bytes_per_s: float | None = None
    allocations: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    error: str | None = None


@dataclass
class GpuResult:
    conditions: GpuConditions
    rows: list[GpuRow]
    host: list[list[HostRow]] = field(default_factory=list)
