"""What is kept of the rows that were measured: measure fills it, json keeps it, tables, pictures and pages read it."""

import math
import statistics
from dataclasses import dataclass, field, replace

from harness.rows.choice import OfChoice
from harness.rows.shared_results import SharedRow


@dataclass
class Message:
    """`bytes` of the full tensor; times in seconds from the start of the step."""
    kind: str
    bytes: int
    start: float
    end: float


@dataclass
class RecordedStep:
    """One step on one rank. Without `seconds` only its exposed time was kept. (start, end) in seconds from its start.

    `memory`: the most bytes that were alive in each of spans.MEMORY_PARTS equal parts.
    """
    exposed_seconds: float
    seconds: float | None = None
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    communication: list[Message] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


@dataclass
class Row(OfChoice):
    """`kind`, `dtype`: see catalogue.Way. Where it failed, `error` says so, and it has no times; `is_wrong`: it
    computes something else than it should.

    Bytes in memory are those of the rank that holds most, by phase ("model", "optimizer", "backward", "step", "peak",
    on CUDA "reserved"), at the peak within each phase, and by kind (kinds.KINDS). Bytes on the wire and bytes a
    parameter are means over the ranks, with the formula's beside them. `timeline`: by rank.
    """
    base: str
    bucket_mb: float | None = None
    kind: str = ""
    dtype: str = "float32"
    error: str | None = None
    is_wrong: bool = False
    rounds_ms: list[float] = field(default_factory=list)  # a steady step, by round
    drain_ms: list[float] = field(default_factory=list)  # after the last; older results, without it, share it out
    vs_reference: float | None = None  # median of the ratios, round by round
    max_abs_diff: float | None = None  # of any parameter on any rank, from the reference's
    collectives: dict[str, int] = field(default_factory=dict)
    message_bytes: dict[str, int] = field(default_factory=dict)
    wire_bytes: int | None = None
    wire_bytes_theory: int | None = None
    line_bytes: int | None = None  # as the interface counted them, in make network
    memory_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    activation_bytes: int | None = None
    held_bytes: dict[str, int] = field(default_factory=dict)
    bytes_per_param: float | None = None
    bytes_per_param_theory: float | None = None
    timeline: list[RecordedStep] = field(default_factory=list)

    @property
    def median_ms(self):
        """Infinite where there are no times: such a row is never the fastest."""
        return statistics.median(self.rounds_ms) if self.rounds_ms else math.inf

    def time(self, step_ms, drain_ms):
        """Of one round."""
        self.rounds_ms.append(step_ms)
        self.drain_ms.append(drain_ms)

    def over(self, other):
        """The median of the ratios of times, round by round: both ran within seconds of each other."""
        return statistics.median(mine / others for mine, others in zip(self.rounds_ms, other.rounds_ms))

    def fail(self, reason, is_wrong=False):
        self.error, self.is_wrong, self.rounds_ms, self.drain_ms = reason, is_wrong, [], []


@dataclass
class Conditions:
    """Under which figures hold. From `rate` on: of two hosts. What an older run didn't note is None."""
    machine: str
    torch: str
    python: str
    backend: str
    device: str
    gpus: int
    ranks: int
    threads_per_rank: int
    model: str
    batch_size: int
    sequence_length: int
    rounds: int
    steps: int
    data: str | None
    seed: int
    parameters: int
    warmup_steps: int
    tolerance: float
    date: str
    dtype: str = ""
    commit: str | None = None
    noise: list[float] = field(default_factory=list)  # ddp again over ddp, by round
    rate: str | None = None
    bits_per_second: float | None = None
    hosts: int | None = None
    tcp: str | None = None
    cores_per_host: int | None = None


@dataclass
class AccumulatedRow:
    """Milliseconds a micro-batch, by round, of steps of so many. The last three lack where only stage 4 was timed."""
    micro_batches: int
    no_sync_ms: list[float] = field(default_factory=list)  # stage 4, one exchange a step
    each_ms: list[float] = field(default_factory=list)  # stage 4, one for each micro-batch
    compute_ms: list[float] = field(default_factory=list)
    ddp_ms: list[float] = field(default_factory=list)
    stage3_ms: list[float] = field(default_factory=list)


@dataclass
class Accumulation:
    """`ddp_mb`: the bucket size of the row that stands for DDP; None: its default."""
    conditions: Conditions
    rows: list[AccumulatedRow]
    ddp_mb: float | None = None


@dataclass
class Sweep:
    conditions: Conditions
    rows: list[Row]


@dataclass
class StateRow:
    """Bytes a parameter by number of ranks."""
    name: str
    formula: str
    bytes_per_param: dict[int, float]
    bytes_per_param_theory: dict[int, float]


@dataclass
class GatheredRow:
    """Elements that a step gathers over those of the model, by number of ranks."""
    name: str
    over_numel: dict[int, float]


@dataclass
class CapRow:
    """Stage 4's default bucket for one model, and what its two buffers hold, in bytes a parameter."""
    model: str
    ranks: int
    model_bytes: int
    buckets: int
    median_bytes: float
    largest_bytes: int
    b_native: float
    b_exchanged: float
    bytes_per_param: float


@dataclass
class HostRow:
    """Milliseconds of the host by phase, and of the "whole" step."""
    name: str
    tensors: int
    d: int
    steps: int
    best_ms: dict[str, float]
    median_ms: dict[str, float]


@dataclass
class Result:
    """Of bench.py or make network. `other_rates`: of the same rows on other lines, in the file of one."""
    conditions: Conditions
    rows: list[Row]
    model_state: list[StateRow] = field(default_factory=list)
    gathered: list[GatheredRow] = field(default_factory=list)
    caps: list[CapRow] = field(default_factory=list)
    host: list[list[HostRow]] = field(default_factory=list)
    shared: list[SharedRow] = field(default_factory=list)
    sweep: Sweep | None = None
    accumulation: Accumulation | None = None
    other_rates: list["Result"] = field(default_factory=list)

    def at_all_rates(self):
        """-> list of Results, each of one rate."""
        return [replace(self, other_rates=[]), *self.other_rates]

    def find(self, base, bucket_mb=None):
        """-> the Row, or None."""
        return next((row for row in self.rows if row.choice == (base, bucket_mb)), None)

    def timed(self, base, bucket_mb=None):
        """-> the Row if it has times, or None."""
        row = self.find(base, bucket_mb)
        return row if row and row.rounds_ms else None
