"""The results that the pages show: files in results/, and what is wrong with one, in a line."""

import json
from pathlib import Path

from harness.rows import catalogue

ROOT = Path(__file__).resolve().parents[2]


def load(name, arguments=""):
    """`arguments`: of the command that makes the file, which is called as what stands before a _ in its name."""
    path = ROOT / "results" / name
    command = f"make {path.stem.split('_')[0]}{arguments}"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"report: {path} is missing: run {command} first") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"report: {path} is damaged: run {command} again ({error})") from None


def by_rate(*others):
    """The results of all rates, and those in other files, the slowest line first."""
    found = [load(name) for name in ("network.json", *others)]
    results = [result for latest in found for result in (latest, *latest["other_rates"])]
    return sorted(results, key=lambda result: result["conditions"]["bits_per_second"])


def load_of(device, name, arguments=""):
    """A result of the bench on that kind of device: a page says "On a GPU", or speaks of gloo."""
    result = load(name, arguments)
    if result["conditions"]["device"] != device:
        raise SystemExit(f"report: results/{name} must be measured with device {device}, and is of "
                         f"{result['conditions']['device']}: CUDA_VISIBLE_DEVICES= hides GPUs from make bench")
    return result


def load_bench():
    result = load_of("cpu", "bench.json")
    right = {row["name"] for row in result["rows"] if "error" not in row}
    if not {"model_state", "gathered", "host"} <= result.keys() or set(catalogue.LADDER) - right:
        raise SystemExit("report: results/bench.json is a part of the bench: run make bench without --quick or --rows")
    return result


PLANS = {"plan.json": ' ARGS="--advise --check --json results/plan.json"',
         "plan_70b.json": ' MODEL=70b ARGS="--tensor-parallel 8 --json results/plan_70b.json"'}


def plans():
    return [load(name, arguments) for name, arguments in PLANS.items()]
