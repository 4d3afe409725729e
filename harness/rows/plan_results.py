"""What is kept of a plan: rows that were run dry, modelled time, and that time beside runs that were measured."""

from dataclasses import dataclass, field

from harness.rows.choice import OfChoice
from harness.rows.results import RecordedStep


@dataclass
class PlanConditions:
    """What was asked, and the hardware that was assumed: rates in FLOPs and bytes a second, latencies in seconds."""
    model: str
    layers: int
    width: int
    world: int
    dtype: str
    device: str
    device_memory: float  # GB
    batch_size: int
    sequence_length: int
    accumulate: int
    tensor_parallel: int
    bucket_cap_mb: float | None
    parameters: int
    activations: float  # bytes of a micro-batch
    efficiency: float
    flops: float
    memory_rate: float
    in_node: float
    between: float
    per_node: int
    sharing: int
    latency_in_node: float
    latency_between: float
    backend: str
    trees: bool


@dataclass
class PlanRow(OfChoice):
    """Bytes on rank 0, after a step by kind, and at the peak; bytes a parameter by number of ranks; a modelled step.

    `in_rings_ms`, `in_trees_ms`: what a micro-batch takes where reduce-scatters and all-gathers go so."""
    base: str
    bucket_mb: float | None
    formula: str
    held: dict[str, float]
    padding: float
    peak: float
    fits_from: int  # number of ranks from which on it fits; 0: with none
    bytes_per_param: dict[int, float]
    bytes_per_param_theory: dict[int, float]
    in_rings_ms: float
    in_trees_ms: float
    step: RecordedStep


@dataclass
class PlanSize(OfChoice):
    """A size of bucket that was tried: as in PlanRow. `is_bucket`: two of them take at most half of the gradients."""
    base: str
    bucket_mb: float | None
    in_rings_ms: float
    in_trees_ms: float
    peak: float
    is_bucket: bool


@dataclass
class ModelledRun(OfChoice):
    """Of a step, or of a micro-batch where a step has several. `where`: file and rate of the run."""
    where: str
    base: str
    bucket_mb: float | None
    measured_ms: float
    modelled_ms: float
    micro_batches: int | None = None
    exchange_each: bool = False

    @property
    def error(self):
        return self.modelled_ms / self.measured_ms - 1

    @property
    def label(self):
        if self.micro_batches is None:
            return self.name
        return f"{self.name}, {self.micro_batches} x {'each' if self.exchange_each else 'once'}"


@dataclass
class PublishedRun:
    """Tokens a second and GPU. `what`: how its hardware was calibrated; `optimizer`: overlapped or distributed."""
    what: str
    optimizer: str
    gpus: int
    sequences: int  # a step
    batch: int  # sequences of a micro-batch
    published: float
    modelled: float

    @property
    def error(self):
        return self.modelled / self.published - 1


@dataclass
class CurveLine:
    """Modelled for two hosts: (bits a second, time of a step over that of computing alone)."""
    base: str
    points: list[tuple[float, float]]


@dataclass
class Check:
    """`hardware`: (TFLOP/s, GB/s of a node) as calibrated, of the publisher's runs and of the user's."""
    two_hosts: list[ModelledRun]
    hardware: list[tuple[float, float]]
    published: list[PublishedRun]
    curve: list[CurveLine] = field(default_factory=list)


@dataclass
class PlanResult:
    conditions: PlanConditions
    rows: list[PlanRow]
    sizes: list[PlanSize]
    advice: list[str] = field(default_factory=list)
    check: Check | None = None
