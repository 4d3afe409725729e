"""What is kept of a measurement: measuring fills it, json keeps it, tables, pictures and pages read it."""

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import rows as catalogue
from harness.rows import HasRowId


class Kept:
    """A dataclass that json keeps: reading one with a field that it doesn't have is an error."""
    __pydantic_config__ = {"extra": "forbid"}

    def __init_subclass__(cls):
        dataclass(cls)


MEMORY_PARTS = 200  # of a step; of each the most that is alive: a picture has no more room, and a peak is never lost


def most_alive(live, start, end):
    """`live`: [(time, bytes), …] -> the most bytes that were alive in each of MEMORY_PARTS equal parts of a step."""
    parts = [0] * MEMORY_PARTS
    for (since, n_bytes), (until, _) in zip(live, [*live[1:], (end, 0)]):
        if since < end and until > start:
            first, last = (int((moment - start) / (end - start) * MEMORY_PARTS) for moment in (since, until))
            for i in range(max(first, 0), min(last + 1, MEMORY_PARTS)):
                parts[i] = max(parts[i], n_bytes)
    return parts


def union(spans):
    """Spans, (start, end) each, that may overlap -> the same time, in spans that don't, in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(ones, others):
    """The time that lies in both; each a list of disjoint spans."""
    return [(max(a, c), min(b, d)) for a, b in ones for c, d in others if max(a, c) < min(b, d)]


def length(spans):
    return sum(end - start for start, end in spans)


def median(values):
    return statistics.median(values) if values else None


def ratio(ones, others):
    """-> the median of the ratios, round by round: both ran within seconds of each other."""
    return median([one / other for one, other in zip(ones, others)])


class Made(Kept):
    """On which machine, by which code, and when."""
    machine: str
    torch: str
    commit: str
    date: str


class LossConditions(Made):
    backend: str
    ranks: int
    model: str
    parameters: int
    batch_size: int
    sequence_length: int
    steps: int


class Conditions(LossConditions):
    """Of a bench. From `rate` on: of two hosts."""
    python: str
    device: str
    gpus: int
    threads_per_rank: int
    rounds: int
    data: str | None
    seed: int
    warmup_steps: int
    tolerance: float
    dtype: str = ""
    noise: list[float] = field(default_factory=list)  # ddp again over ddp, by round
    rate: str | None = None
    bits_per_second: float | None = None
    hosts: int | None = None
    tcp: str | None = None
    cores_per_host: int | None = None


class GpuConditions(Made):
    dtype: str
    steps: int
    copy_bytes_per_s: float


class SavingConditions(Made):
    """`bytes`: that all ranks together write. `step_ms`: a step without a save, the median of the rounds."""
    ranks: int
    bytes: int
    rounds: int
    step_ms: float


class Message(Kept):
    """`bytes` of the full tensor; times in seconds from the start of the step."""
    kind: str
    bytes: int
    start: float
    end: float


class RecordedStep(Kept):
    """One step on one rank, (start, end) in seconds from its start. Without `seconds` only its exposed time was kept.
    `memory`: the most bytes that were alive in each of MEMORY_PARTS equal parts."""
    exposed_seconds: float
    seconds: float | None = None
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    communication: list[Message] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


class Row(HasRowId, Kept):
    """`kind`, `dtype`: see rows.Configuration. A row with an `error` has no times; `is_wrong`: it computes something
    else than it should. Bytes in memory: of the rank that holds most, after each phase ("model", "optimizer",
    "backward", "step", "peak", on CUDA "reserved"), at the peak within each, and by kind (memory.KINDS). Bytes on the
    wire and a parameter: means over the ranks, the formula's beside them. `timeline`: by rank."""
    base: str
    bucket_mb: float | None = None
    kind: str = ""
    dtype: str = "float32"
    error: str | None = None
    is_wrong: bool = False
    rounds_ms: list[float] = field(default_factory=list)  # a steady step, by round
    drain_ms: list[float] = field(default_factory=list)  # after the last
    vs_reference: float | None = None  # median of the ratios, round by round
    max_abs_diff: float | None = None  # of any parameter on any rank, from the reference's
    collectives: dict[str, int] = field(default_factory=dict)
    message_bytes: dict[str, int] = field(default_factory=dict)
    wire_bytes: int | None = None
    wire_bytes_theory: int | None = None
    line_bytes: int | None = None  # as the interface counted them, in make bench WHAT=network
    memory_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    activation_bytes: int | None = None
    held_bytes: dict[str, int] = field(default_factory=dict)
    bytes_per_param: float | None = None
    bytes_per_param_theory: float | None = None
    timeline: list[RecordedStep] = field(default_factory=list)

    # Infinite where there are no times: such a row is never the fastest.
    median_ms = property(lambda self: statistics.median(self.rounds_ms) if self.rounds_ms else math.inf)
    # On the rank with most; None where no step was recorded.
    exposed_ms = property(lambda self: max((1000 * step.exposed_seconds for step in self.timeline), default=None))

    def time(self, step_ms, drain_ms):
        """Of one round."""
        self.rounds_ms.append(step_ms)
        self.drain_ms.append(drain_ms)

    def over(self, other):
        return ratio(self.rounds_ms, other.rounds_ms)

    def fail(self, reason, is_wrong=False):
        self.error, self.is_wrong, self.rounds_ms, self.drain_ms = reason, is_wrong, [], []


class AccumulatedRow(Kept):
    """Milliseconds a micro-batch, by round, of steps of so many. The last three lack where only stage 4 was timed."""
    micro_batches: int
    no_sync_ms: list[float] = field(default_factory=list)  # stage 4, one exchange a step
    each_ms: list[float] = field(default_factory=list)  # stage 4, one for each micro-batch
    compute_ms: list[float] = field(default_factory=list)
    ddp_ms: list[float] = field(default_factory=list)
    stage3_ms: list[float] = field(default_factory=list)


class Accumulation(Kept):
    """`ddp_mb`: the bucket size of the row that stands for DDP; None: its default."""
    conditions: Conditions
    rows: list[AccumulatedRow]
    ddp_mb: float | None = None


class Sweep(Kept):
    conditions: Conditions
    rows: list[Row]


class StateRow(Kept):
    """Bytes a parameter by number of ranks."""
    name: str
    formula: str
    bytes_per_param: dict[int, float]
    bytes_per_param_theory: dict[int, float]


class GatheredRow(Kept):
    """Elements that a step gathers over those of the model, by number of ranks."""
    name: str
    over_numel: dict[int, float]


class CapRow(Kept):
    """Stage 4's default bucket: sizes in bytes; what its two buffers hold, in bytes a parameter."""
    model: str
    ranks: int
    model_bytes: int
    buckets: int
    median_bytes: float
    largest_bytes: int
    b_native: float
    b_exchanged: float
    bytes_per_param: float


class HostRow(Kept):
    """Milliseconds of the host by phase, and of the "whole" step."""
    name: str
    tensors: int
    d: int
    steps: int
    best_ms: dict[str, float]
    median_ms: dict[str, float]


class Result(Sweep):
    """Of bench.py or make bench WHAT=network. `other_rates`: of the same rows on other lines, in the file of one."""
    model_state: list[StateRow] = field(default_factory=list)
    gathered: list[GatheredRow] = field(default_factory=list)
    caps: list[CapRow] = field(default_factory=list)
    host: list[list[HostRow]] = field(default_factory=list)
    sweep: Sweep | None = None
    accumulation: Accumulation | None = None
    other_rates: list["Result"] = field(default_factory=list)

    def at_all_rates(self):
        """-> list of Results, each of one rate."""
        return [replace(self, other_rates=[]), *self.other_rates]

    def find(self, base, bucket_mb=None):
        """-> the Row, or None."""
        return next((row for row in self.rows if row.row_id == (base, bucket_mb)), None)

    def timed(self, base, bucket_mb=None):
        """-> the Row if it has times, or None."""
        row = self.find(base, bucket_mb)
        return row if row and row.rounds_ms else None


class FaultRow(Kept):
    """What was done to a run, how often, what was seen, and whether its end was that of an undisturbed run."""
    fault: str
    times: int
    seen: str
    end: str


class Stop(Kept):
    """Of a run that moves on: after which step, where it was trained until there, its loss, and DDP's."""
    step: int
    where: str
    loss: float
    undisturbed: float


class FaultResult(Kept):
    conditions: Made
    stage: int
    rows: list[FaultRow]
    journey: list[Stop]


class MutationRow(Kept):
    """Checkpoints changed in one way: how many were refused, were loaded and then stepped and saved, or went wrong."""
    kind: str
    refused: int
    loaded: int
    wrong: int


class MutationResult(Kept):
    conditions: Made
    number: int
    seed: int
    rows: list[MutationRow]


class GpuRow(Kept):
    """`stage`: a package, or "fused AdamW". What torch's allocator handed out, and took for that: None on a CPU. An
    out-of-memory is a result as well: `error`, and no figures."""
    stage: str
    model: str
    d: int
    step_ms: float | None = None
    bytes_per_s: float | None = None
    allocations: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    error: str | None = None


class GpuStep(Kept):
    """Recorded steps of rank 0 of `d`, beside a link that is played: see gpu_step.py. `step`: of median length."""
    name: str
    model: str
    d: int
    link_bytes_per_s: float
    batch_size: int
    sequence_length: int
    rounds_ms: list[float] = field(default_factory=list)
    step: RecordedStep | None = None


class GpuResult(Kept):
    conditions: GpuConditions
    rows: list[GpuRow]
    host: list[list[HostRow]] = field(default_factory=list)
    steps: list[GpuStep] = field(default_factory=list)


class LossRow(Kept):
    """`losses`: nats a byte of text that was kept for that, after the last step, by seed. `base`: the name of the row
    of the same beta2 that it is compared with."""
    name: str
    base: str
    beta2: float
    losses: list[float]


class LossResult(Kept):
    conditions: LossConditions
    rows: list[LossRow]


class PlanRow(HasRowId, Kept):
    """Bytes on rank 0, after a step by kind, and at the peak; bytes a parameter, and ms of a micro-batch, by number of
    ranks. `once_ms`, `each_ms`: of one of eight, with one exchange a step, or with one each. `step`: modelled."""
    base: str
    bucket_mb: float | None
    formula: str
    held: dict[str, float]
    padding: float
    peak: float
    fits_from: int  # number of ranks from which on it fits; 0: with none
    bytes_per_param: dict[int, float]
    bytes_per_param_theory: dict[int, float]
    ms: dict[int, float]
    once_ms: float
    each_ms: float
    step: RecordedStep


class PlanSize(HasRowId, Kept):
    """A size of bucket that was tried: as in PlanRow. `is_bucket`: two of them take at most half of the gradients."""
    base: str
    bucket_mb: float | None
    ms: float
    peak: float
    is_bucket: bool


class ModelledRun(HasRowId, Kept):
    """Of a step. `where`: the rate of the line between the two hosts."""
    where: str
    base: str
    bucket_mb: float | None
    measured_ms: float
    modelled_ms: float
    error = property(lambda self: self.modelled_ms / self.measured_ms - 1)


class PublishedRun(Kept):
    """Tokens a second and GPU. `what`: how its hardware was calibrated; `optimizer`: overlapped or distributed."""
    what: str
    optimizer: str
    gpus: int
    sequences: int  # a step
    batch: int  # sequences of a micro-batch
    published: float
    modelled: float
    error = property(lambda self: self.modelled / self.published - 1)


class Check(Kept):
    """`hardware`: (TFLOP/s, GB/s of a node) as calibrated, of the publisher's runs and of the user's."""
    two_hosts: list[ModelledRun]
    hardware: list[tuple[float, float]]
    published: list[PublishedRun]


class PlanResult(Kept):
    """`conditions`: what was asked of make plan, the hardware that was assumed (FLOPs and bytes a second, seconds),
    `device_memory` in GB, `activations` in bytes of a micro-batch, and in `made` when and where."""
    conditions: dict
    rows: list[PlanRow]
    sizes: list[PlanSize]
    check: Check | None = None


class SavingRow(Kept):
    """`beside`: the row whose rate is the disk's for this one; "": it is the disk. Seconds of the slowest rank."""
    name: str
    beside: str
    rounds_s: list[float]
    median_s = property(lambda self: statistics.median(self.rounds_s))


class SavingResult(Kept):
    """Of an asynchronous save, by round. `held_up_ms`: how long it holds up the step that calls it. `n_behind`: steps
    that ran while it was written; `behind_ms`: what these took more than as many without."""
    conditions: SavingConditions
    rows: list[SavingRow]
    held_up_ms: list[float]
    behind_ms: list[float]
    n_behind: list[int]


# ----------------------------------------------- What is measured is kept as json, of dataclasses, with a schema number


SCHEMA = 1  # of all files of results: raise it when a field changes its name or its meaning


def to_json(result):
    """A dataclass -> text: the schema first, a line for each row, nine digits of a figure."""
    text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(result)})
    return _lines(json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))) + "\n"


def _lines(value):
    if isinstance(value, dict) and value.keys() & {"schema", "rows"}:
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(one)}" for key, one in value.items()) + "\n}"
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return "[\n" + ",\n".join(map(_lines, value)) + "\n]"
    return json.dumps(value)


def from_json(kind, text):
    """-> an object of dataclass `kind`. Raises ValueError, of one line: no json, another schema, other fields."""
    try:
        from pydantic import TypeAdapter, ValidationError  # here: who only measures doesn't need it
    except ImportError:
        raise SystemExit("reading results needs pydantic: pip install pydantic") from None
    try:
        found = json.loads(text)
        schema = found.pop("schema", None) if isinstance(found, dict) else None
        if schema == SCHEMA:
            return TypeAdapter(kind).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (kind.__name__, *first["loc"])))
        raise ValueError(f"{where}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"it is no json ({error})") from None
    raise ValueError("it has no schema: it is no result, or an older one" if schema is None else
                     f"its schema is {schema}, this program's is {SCHEMA}")


def merged(result, before, kept=("accumulation", "sweep")):
    """-> `result` with the results of other rates in `before` behind it, each of one rate. Of the one at the same rate
    the parts called `kept` are taken over where `result` has none. Recorded steps are kept where they are drawn."""
    for other in before:
        for name in kept if other.conditions.rate == result.conditions.rate else ():
            setattr(result, name, getattr(result, name) or getattr(other, name))
    result.other_rates = [other for other in before if other.conditions.rate != result.conditions.rate]
    results = [result, *result.other_rates]
    for other in results:
        if other is not to_draw(results):
            keep_exposed_only(other.rows)
    return result


def to_draw(results):
    """Of results at several rates, the one to be drawn: at the lowest there is most to see. None: no step was kept."""
    drawable = [result for result in results if any(step.seconds for row in result.rows for step in row.timeline)]
    return min(drawable, key=lambda result: result.conditions.bits_per_second, default=None)


def keep_exposed_only(rows):
    """Of the recorded steps, what the tables show."""
    for row in rows:
        row.timeline = [RecordedStep(step.exposed_seconds) for step in row.timeline]


# ---------------------------- The results that the pages show: files in results/, and what is wrong with one, in a line


ROOT = Path(__file__).resolve().parents[1]
# Of results/ and of measured/: what a file holds.
FILES = {
    **dict.fromkeys(("bench.json", "bench_bfloat16.json", "bench_cuda.json", "bench_variants.json", "network.json",
                     "network_variants.json", "network_hybrid.json", "network_muon.json"), Result),
    "cuda.json": GpuResult, "saving.json": SavingResult, "faults.json": FaultResult,
    "faults_mutations.json": MutationResult, "losses.json": LossResult, "plan.json": PlanResult,
    "plan_70b.json": PlanResult}


def load(name, folder="results"):
    """-> what a file of results/ or measured/ holds, of its dataclass."""
    path = ROOT / folder / name
    try:
        return from_json(FILES[name], path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"report: {path} can't be shown: measure it again (results/ by make figures), or take the "
                         f"committed one: {error}") from None


def at_all_rates():
    """The results of make bench WHAT=network at all rates, the slowest line first."""
    return sorted(load("network.json").at_all_rates(), key=lambda result: result.conditions.bits_per_second)


def by_rate():
    """Those with all rows; others have those of the curve."""
    return [result for result in at_all_rates() if all(map(result.find, catalogue.LADDER))]


def provenance(result):
    """-> [(rate of the link or None, Made)] of each part of a file's figures."""
    if isinstance(result, Result):
        return [(one.conditions.rate, part.conditions) for one in result.at_all_rates()
                for part in (one, one.sweep, one.accumulation) if part]
    return [(None, Made(**result.conditions["made"]) if isinstance(result, PlanResult) else result.conditions)]


def load_bench():
    """That of a CPU, and whole: pages speak of gloo, and of all rows."""
    result = load("bench.json")
    if result.conditions.device != "cpu":
        raise SystemExit("report: results/bench.json must be measured with device cpu, and is of "
                         f"{result.conditions.device}: CUDA_VISIBLE_DEVICES= hides GPUs from make bench")
    right = {row.name for row in result.rows if not row.error}
    if not (result.model_state and result.gathered and result.host) or set(catalogue.LADDER) - right:
        raise SystemExit("report: results/bench.json is a part of the bench: run make bench without --quick or --rows")
    return result
