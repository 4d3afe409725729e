"""bench.py: the json that it promises, counts that equal the formulas, and no time for what is wrong."""

import json
import shutil
import subprocess
import sys

import pytest

import bench
from tests.ranks import ROOT, run_alone

NANO = ["--model", "nano", "--sequence-length", "16", "--batch-size", "2", "--rounds", "1", "--steps", "1"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of bench.py in this process, whose ranks then start at once."""
    path = tmp_path_factory.mktemp("results") / "bench.json"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["bench.py", *NANO, "--json", str(path)])
        bench.main()
    assert not end.value.code
    return json.loads(path.read_text())


def test_schema(result):
    keys = {"name", "kind", "step_ms", "vs_reference", "collectives", "wire_bytes", "wire_bytes_theory", "memory_bytes"}
    keys |= {"bytes_per_param", "bytes_per_param_theory", "max_abs_diff"}
    assert set(result) == {"conditions", "rows", "model_state"}
    for row in result["rows"]:
        assert keys <= set(row), row["name"]
        assert set(row["step_ms"]) == {"median", "min", "max", "rounds"}
        assert {"model", "optimizer", "backward", "step", "peak"} <= set(row["memory_bytes"])
        assert row["kind"] in ("floor", "reference", "stage", "peer", "noise")
        assert [set(step) for step in row["timeline"]] == [{"exposed_seconds"}] * 2
    kinds = [row["kind"] for row in result["rows"]]
    assert kinds.count("floor") == kinds.count("reference") == kinds.count("noise") == 1 and kinds.count("stage") == 6
    assert {"torch", "backend", "ranks", "model", "batch_size", "dtype", "rounds"} <= set(result["conditions"])


def test_the_noise_is_ddp_beside_itself(result):
    rounds = {row["kind"]: row["step_ms"]["rounds"] for row in result["rows"]}
    assert result["conditions"]["noise"] == [one / other for one, other in zip(rounds["noise"], rounds["reference"])]


def test_whoever_sends_nothing_has_nothing_exposed(result):
    exposed = {row["name"]: [step["exposed_seconds"] for step in row["timeline"]] for row in result["rows"]}
    assert exposed["compute only"] == [0, 0]


def test_no_stage_differs_from_ddp(result):
    assert [row["max_abs_diff"] for row in result["rows"] if row["kind"] == "stage"] == [0.0] * 6


def test_what_is_counted_is_what_the_formula_says(result):
    """Up to what the formulas leave out: scalars (step counts, flags of used parameters) and padding."""
    for row in result["rows"]:
        theory, slack = row["wire_bytes_theory"], 8 * 32  # 30 parameters
        if "reduce_scatter" in row["collectives"]:  # gloo's is an all-reduce underneath
            theory += row["wire_bytes_theory"] / {"fsdp2 reshard": 3}.get(row["name"], 2)  # one trip more
        assert row["wire_bytes"] == pytest.approx(theory, rel=0.01, abs=slack), row["name"]
        assert row["bytes_per_param"] == pytest.approx(row["bytes_per_param_theory"], rel=0.005), row["name"]


def test_collectives(result):
    counted = {row["name"]: row["collectives"] for row in result["rows"]}
    assert counted["stage 1 naive broadcast"] == {"all_reduce": 1, "broadcast": 2}
    assert counted["stage 2 all-gather"] == {"all_reduce": 1, "all_gather": 1}
    assert counted["stage 3 grad buffer"] == {"reduce_scatter": 1, "all_gather": 1}
    assert counted["compute only"] == {}


def test_a_wrong_stage_gets_no_time(tmp_path):
    """Of bench.py as people run it."""
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", "results", "tests")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    stage = tmp_path / "copy" / "stage2_allgather" / "optimizer.py"
    right = stage.read_text()
    stage.write_text(right.replace("/= self.world_size", "/= self.world_size + 1"))
    assert stage.read_text() != right
    command = [sys.executable, "bench.py", *NANO, "--rows", "stage 2 all-gather", "--json", "wrong.json"]
    run = subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "copy" / "wrong.json").read_text())["rows"]}
    wrong = rows["stage 2 all-gather"]
    assert not wrong.get("step_ms") and "error" in wrong
    assert rows["ddp"]["step_ms"]["median"] > 0


@pytest.mark.parametrize(
    "args, message",
    [
        (["--ranks", "0"], "--ranks is 0"),
        (["--model", "huge"], "huge"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--rows", "stage 9"], "stage 9"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(args, message):
    run = run_alone("bench.py", *args)
    assert run.code == 2
    assert run.stderr.count("\n") == 1 and message in run.stderr
