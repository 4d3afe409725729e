"""The results that the pages show: files in results/, and what is wrong with one, in a line."""

from pathlib import Path

from harness.rows import catalogue, saved
from harness.rows.plan_results import PlanResult
from harness.rows.results import Result

ROOT = Path(__file__).resolve().parents[2]


def load(name, kind=Result, arguments=""):
    """-> what the file holds, of a dataclass. `arguments`: of the command that makes the file, which is called as what
    stands before a _ in its name."""
    return read(ROOT / "results" / name, kind, arguments)


def read(path, kind, arguments=""):
    """As `load`, of any file."""
    command = f"make {path.stem.split('_')[0]}{arguments}"
    try:
        return saved.from_json(kind, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"report: {path} is missing: run {command} first") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"report: {path} can't be shown: run {command} again ({error})") from None


def at_all_rates():
    """The results of make network at all rates, the slowest line first."""
    return sorted(load("network.json").at_all_rates(), key=lambda result: result.conditions.bits_per_second)


def by_rate():
    """Those with all rows; others have those of the curve."""
    return [result for result in at_all_rates() if all(map(result.find, catalogue.LADDER))]


def load_of(device, name, arguments=""):
    """A result of the bench on that kind of device: a page says "On a GPU", or speaks of gloo."""
    result = load(name, arguments=arguments)
    if result.conditions.device != device:
        raise SystemExit(f"report: results/{name} must be measured with device {device}, and is of "
                         f"{result.conditions.device}: CUDA_VISIBLE_DEVICES= hides GPUs from make bench")
    return result


def load_bench():
    result = load_of("cpu", "bench.json")
    check_whole(result, "results/bench.json")
    return result


def check_whole(result, name):
    right = {row.name for row in result.rows if not row.error}
    if not (result.model_state and result.gathered and result.host) or set(catalogue.LADDER) - right:
        raise SystemExit(f"report: {name} is a part of the bench: run make bench without --quick or --rows")


PLANS = {"plan.json": ' ARGS="--advise --check --json results/plan.json"',
         "plan_70b.json": ' MODEL=70b ARGS="--tensor-parallel 8 --json results/plan_70b.json"'}


def load_plan(name):
    return load(name, PlanResult, PLANS[name])
