"""Saves measurements as json, and reads them for pages: rows, recorded steps and finished tables."""

import dataclasses
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from harness.publishing import row_names
from harness.publishing.row_names import HasRowId

ROOT = Path(__file__).resolve().parents[2]


class Record:
    """A dataclass that is saved as json. Reading a field that it doesn't have is an error."""
    __pydantic_config__ = {"extra": "forbid"}

    def __init_subclass__(cls):
        dataclass(cls)


# ----------------------------------------------------------------------------------------------------- Spans of time


MEMORY_PARTS = 200  # equal parts of a step; each keeps its largest value, so a picture never loses a peak


def most_alive(live, start, end):
    """Return the most bytes alive in each of MEMORY_PARTS equal parts of a step; `live`: [(time, bytes), …]."""
    parts = [0] * MEMORY_PARTS
    for (since, n_bytes), (until, _) in zip(live, [*live[1:], (end, 0)]):
        if since < end and until > start:
            first, last = (int((moment - start) / (end - start) * MEMORY_PARTS) for moment in (since, until))
            for i in range(max(first, 0), min(last + 1, MEMORY_PARTS)):
                parts[i] = max(parts[i], n_bytes)
    return parts


def union(spans):
    """Merge spans, (start, end) each, that overlap; return disjoint ones in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(spans, other_spans):
    """Return the spans that lie in both lists of disjoint spans."""
    return [(max(a, c), min(b, d)) for a, b in spans for c, d in other_spans if max(a, c) < min(b, d)]


def length(spans):
    """Add up the lengths of disjoint spans."""
    return sum(end - start for start, end in spans)


def median(values):
    """Return the median, or None of an empty list."""
    return statistics.median(values) if values else None


def ratio(values, other_values):
    """Return the median of the ratios, round by round: both ran within seconds of each other."""
    return median([value / other for value, other in zip(values, other_values)])


# ------------------------------------------------------------------------------------------ Conditions, and the tables


class Made(Record):
    """On which machine, by which code, and when."""
    machine: str
    torch: str
    commit: str
    date: str


class Conditions(Made):
    """How a bench was run. The fields from `rate` on are those of two hosts."""
    python: str
    backend: str
    device: str
    gpus: int
    ranks: int
    threads_per_rank: int
    model: str
    parameters: int
    batch_size: int
    sequence_length: int
    rounds: int
    steps: int
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


class Marked(Record):
    """A number and what stands behind it in a cell: ~ for noise, a footnote's mark, or a formula in brackets."""
    value: float
    mark: str


class Column(Record):
    """A column of a Sheet. `source` says where its numbers come from: measured, counted, formula, modelled, published.

    `form` is how a number is written: a format, or a name in tables.FORMS; tables.TEXT is for words. `shows`: of the
    numbers of several rounds "median", "range", or "both".
    """
    key: str
    title: str
    source: str = ""
    form: str = ""
    shows: str = "median"


class Sheet(Record):
    """One table: a list of cells for each row, and a key. `footnotes` explain marks in cells, `notes` the rest."""
    title: str
    columns: list[Column]
    row_keys: list[str]
    rows: list[list[str | int | float | Marked | list[float] | None]]
    notes: list[str] = field(default_factory=list)
    footnotes: list[str] = field(default_factory=list)

    def numbers(self, key):
        """Return {key of the row: number} of a column; None where there is none."""
        place = [column.key for column in self.columns].index(key)
        cells = dict(zip(self.row_keys, (row[place] for row in self.rows)))
        return {row_key: cell.value if isinstance(cell, Marked) else cell for row_key, cell in cells.items()}


# ------------------------------------------------------------------------------------------- Steps, and rows of a bench


class Message(Record):
    """`bytes` of the full tensor; times in seconds from the start of the step."""
    kind: str
    bytes: int
    start: float
    end: float


class RecordedStep(Record):
    """One step on one rank; spans are (start, end) in seconds from its start. Without `seconds` only its exposed time
    was saved. `memory`: the most bytes that were alive in each of MEMORY_PARTS equal parts."""
    exposed_seconds: float
    seconds: float | None = None
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    communication: list[Message] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


class Row(HasRowId, Record):
    """What was measured of one configuration. `kind`, `dtype`: see rows.Configuration.

    A row with an `error` has no times; `is_wrong`: it computes something else than it should. Bytes in memory are those
    of the rank that holds most: after each phase ("model", "optimizer", "backward", "step", "peak", on CUDA
    "reserved"), at the peak within each, and by kind (memory.KINDS). Bytes on the wire and bytes per parameter are
    means over the ranks, with the formula's beside them. `timeline` has a recorded step for each rank.
    """
    base: str
    bucket_mb: float | None = None
    kind: str = ""
    dtype: str = "float32"
    error: str | None = None
    is_wrong: bool = False
    rounds_ms: list[float] = field(default_factory=list)  # a steady step, by round
    drain_ms: list[float] = field(default_factory=list)  # after the last step of a round
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
        """Add the times of one round."""
        self.rounds_ms.append(step_ms)
        self.drain_ms.append(drain_ms)

    def over(self, other):
        """Return how many times the other row's time this one takes: the median of the ratios, round by round."""
        return ratio(self.rounds_ms, other.rounds_ms)

    def fail(self, reason, is_wrong=False):
        self.error = reason
        self.is_wrong = is_wrong
        self.rounds_ms = []
        self.drain_ms = []


class AccumulatedRow(Record):
    """Milliseconds per micro-batch, by round, of steps of `micro_batches`."""
    micro_batches: int
    no_sync_ms: list[float] = field(default_factory=list)  # stage 4, one exchange per step
    each_ms: list[float] = field(default_factory=list)  # stage 4, one exchange per micro-batch
    compute_ms: list[float] = field(default_factory=list)
    ddp_ms: list[float] = field(default_factory=list)
    stage3_ms: list[float] = field(default_factory=list)


class Accumulation(Record):
    """`ddp_mb`: the bucket size of the row that stands for DDP; None: its default."""
    conditions: Conditions
    rows: list[AccumulatedRow]
    ddp_mb: float | None = None


class Sweep(Record):
    conditions: Conditions
    rows: list[Row]


class Result(Sweep):
    """What bench.py or make bench WHAT=network measured. `sheets`: tables that don't depend on the rows' times; `host`:
    host time by number of ranks. `other_rates`: results of the same rows on other links, in the file of this one."""
    sheets: dict[str, Sheet] = field(default_factory=dict)
    host: dict[int, Sheet] = field(default_factory=dict)
    sweep: Sweep | None = None
    accumulation: Accumulation | None = None
    other_rates: list["Result"] = field(default_factory=list)

    def at_all_rates(self):
        """Return a list of Results, each of one rate."""
        return [replace(self, other_rates=[]), *self.other_rates]

    def find(self, base, bucket_mb=None):
        """Return the Row, or None."""
        return next((row for row in self.rows if row.row_id == (base, bucket_mb)), None)

    def timed(self, base, bucket_mb=None):
        """Return the Row if it has times, or None."""
        row = self.find(base, bucket_mb)
        return row if row and row.rounds_ms else None


class Report(Record):
    """What any other program measured: its tables, and beside them what pages say in a sentence or draw."""
    conditions: Made
    sheets: dict[str, Sheet]
    host: dict[int, Sheet] = field(default_factory=dict)
    figures: dict[str, float | str] = field(default_factory=dict)
    steps: dict[str, RecordedStep] = field(default_factory=dict)
    title: str = ""  # of the picture of `steps`


def commit(folder=ROOT):
    """Return the commit of the code, "abc1234", with a + where code has changed since; outside of git "unknown"."""
    def git(*command):
        return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout
    try:
        # Results and pages may be in the making.
        is_changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "Makefile") != ""
        head = git("rev-parse", "--short", "HEAD").strip()
        return f"{head}+" if is_changed else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def made_here():
    """Return a Made: this machine, this code and today."""
    return Made(cpu_name(), importlib.metadata.version("torch"), commit(), date.today().isoformat())


def cpu_name():
    """Return the processor's name, as Linux has it, or else the little that Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


# ----------------------------------------------------------------------------- json, of records, with a schema number


SCHEMA = 2  # of all files of results/: raise it when a field changes its name or its meaning


def to_json(result):
    """Write a Record as json: the schema first, a line for each row, nine digits of each number."""
    text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(result)})
    return _lines(json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))) + "\n"


def _lines(value):
    has_dicts = isinstance(value, dict) and value and all(isinstance(part, dict) for part in value.values())
    if has_dicts or isinstance(value, dict) and value.keys() & {"schema", "rows"}:
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(part)}" for key, part in value.items()) + "\n}"
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return "[\n" + ",\n".join(map(_lines, value)) + "\n]"
    return json.dumps(value)


def from_json(kind, text):
    """Read a Record of class `kind`. Raises ValueError, in one line: no json, another schema, other fields."""
    try:
        from pydantic import TypeAdapter, ValidationError  # a program that only measures doesn't need it
    except ImportError:
        raise SystemExit("reading results needs pydantic: pip install pydantic") from None
    try:
        fields = json.loads(text)
        schema = fields.pop("schema", None) if isinstance(fields, dict) else None
        if schema == SCHEMA:
            return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (kind.__name__, *first["loc"])))
        raise ValueError(f"{place}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"it is no json ({error})") from None
    if schema is None:
        raise ValueError("it has no schema: it is no result, or an older one")
    raise ValueError(f"its schema is {schema}, this program's is {SCHEMA}")


def merged(result, earlier, reused=("accumulation", "sweep")):
    """Return `result` with the `earlier` results of other rates behind it, each of one rate.

    Fields named in `reused` that `result` lacks are taken from the earlier result of its rate. Recorded steps are saved
    whole for the rate that is drawn, and as their exposed time for the others.
    """
    for other in earlier:
        if other.conditions.rate == result.conditions.rate:
            for name in reused:
                setattr(result, name, getattr(result, name) or getattr(other, name))
    result.other_rates = [other for other in earlier if other.conditions.rate != result.conditions.rate]
    results = [result, *result.other_rates]
    for other in results:
        if other is not to_draw(results):
            keep_exposed_only(other.rows)
    return result


def to_draw(results):
    """Return the result of the lowest rate with recorded steps, where there is most to see; None: no step was saved."""
    drawable = [result for result in results if any(step.seconds for row in result.rows for step in row.timeline)]
    return min(drawable, key=lambda result: result.conditions.bits_per_second, default=None)


def keep_exposed_only(rows):
    """Drop from the recorded steps what no table shows."""
    for row in rows:
        row.timeline = [RecordedStep(step.exposed_seconds) for step in row.timeline]


# ---------------------------- The results that the pages show: files in results/, and what is wrong with one, in a line


# The class of each file of results/ and of measured/.
FILES = {
    **dict.fromkeys(("bench.json", "bench_bfloat16.json", "bench_cuda.json", "bench_variants.json", "network.json",
                     "network_variants.json", "network_hybrid.json", "network_muon.json"), Result),
    **dict.fromkeys(("cuda.json", "faults.json", "losses.json", "plan.json", "plan_70b.json"), Report)}


def load(name, folder="results"):
    """Read a file of results/ or measured/. Ends the program, in one line, if it can't be read."""
    path = ROOT / folder / name
    try:
        return from_json(FILES[name], path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"report: {path} can't be shown: measure it again (results/ by make figures), or take the "
                         f"committed one: {error}") from None


def at_all_rates():
    """Return the results of make bench WHAT=network, the slowest link first."""
    return sorted(load("network.json").at_all_rates(), key=lambda result: result.conditions.bits_per_second)


def by_rate():
    """Return those of them that have all rows of the ladder; the others have the rows of the curve."""
    return [result for result in at_all_rates() if all(map(result.find, row_names.LADDER))]


def provenance(result):
    """Return [(rate of the link or None, Made)] of each part of a file's figures."""
    if not isinstance(result, Result):
        return [(None, result.conditions)]
    return [(of_rate.conditions.rate, part.conditions) for of_rate in result.at_all_rates()
            for part in (of_rate, of_rate.sweep, of_rate.accumulation) if part]


def load_bench():
    """Read results/bench.json, which must be of a CPU, and whole: pages speak of gloo, and of all rows."""
    result = load("bench.json")
    if result.conditions.device != "cpu":
        raise SystemExit("report: results/bench.json must be measured with device cpu, and is of "
                         f"{result.conditions.device}: CUDA_VISIBLE_DEVICES= hides GPUs from make bench")
    right = {row.name for row in result.rows if not row.error}
    if not (result.host and {"model_state", "gathered"} <= result.sheets.keys()) or set(row_names.LADDER) - right:
        raise SystemExit("report: results/bench.json is a part of the bench: run make bench without --quick or --rows")
    return result
