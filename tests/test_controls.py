"""Negative controls: the contract, run on optimizers that are wrong, must fail, and in the test that is about it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EQUAL = "test_equals_replicated_training[{}-2-AdamW-unfused]"
SHARDED = "test_state_is_sharded[{}-2]"


@pytest.mark.parametrize(
    "control, fails, passes",
    [
        ("stage2_allgather", [], [EQUAL, SHARDED]),  # the same command on a right one
        ("tests.controls.noop", [EQUAL, SHARDED], []),
        ("tests.controls.unsharded", [SHARDED], [EQUAL]),
        ("tests.controls.skips_one", [EQUAL], [SHARDED]),
    ],
)
def test_the_contract_tells_right_from_wrong(control, fails, passes):
    tests = [f"tests/test_contract.py::{test.format(control)}" for test in (EQUAL, SHARDED)]
    command = [sys.executable, "-m", "pytest", "--stage", control, "--ranks", "2", "-rA", "--tb=no", "-q", *tests]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == (1 if fails else 0), run.stdout + run.stderr
    for outcome, names in (("FAILED", fails), ("PASSED", passes)):
        for name in names:
            assert f"{outcome} tests/test_contract.py::{name.format(control)}" in run.stdout, run.stdout
