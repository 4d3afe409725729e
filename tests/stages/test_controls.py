"""Negative controls: the contract, run on optimizers that are wrong, must fail, and in the test that is about it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EQUAL = "test_equals_replicated_training[{}-2-AdamW-unfused]"
SHARDED = "test_state_is_sharded[{}-2]"


CONTROLS = {  # which tests fail; the others pass
    "stage2_allgather": [],  # a right one
    "tests.stages.controls.noop": [EQUAL, SHARDED],
    "tests.stages.controls.unsharded": [SHARDED],
    "tests.stages.controls.skips_one": [EQUAL],
}


@pytest.fixture(scope="module")
def contract():
    """One run of the contract's two tests over all controls -> subprocess.CompletedProcess."""
    stages = [f"--stage={control}" for control in CONTROLS]
    contract = "tests/stages/test_contract.py"
    tests = [f"{contract}::{test.format(control)}" for control in CONTROLS for test in (EQUAL, SHARDED)]
    command = [sys.executable, "-m", "pytest", *stages, "--ranks", "2", "-rA", "--tb=no", "-q", *tests]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stdout + run.stderr
    return run


@pytest.mark.parametrize("control", CONTROLS)
def test_the_contract_tells_right_from_wrong(control, contract):
    for test in (EQUAL, SHARDED):
        outcome = "FAILED" if test in CONTROLS[control] else "PASSED"
        assert f"{outcome} tests/stages/test_contract.py::{test.format(control)}" in contract.stdout, contract.stdout
    assert len(re.findall(rf"^[A-Z]+ .*{re.escape(control)}-", contract.stdout, re.MULTILINE)) == 2, contract.stdout
