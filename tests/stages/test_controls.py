"""Negative controls: the contract, run on optimizers that are wrong, must fail, and in the test that is about it."""

import re

import pytest

from tests.ranks import run_module

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
    """One run of the contract's two tests over all controls -> Ended."""
    stages = [f"--stage={control}" for control in CONTROLS]
    contract = "tests/stages/test_contract.py"
    tests = [f"{contract}::{test.format(control)}" for control in CONTROLS for test in (EQUAL, SHARDED)]
    run = run_module("pytest", *stages, "--ranks", "2", "-rA", "--tb=no", "-q", *tests)
    assert run.code == 1, run.stdout + run.stderr
    return run


@pytest.mark.parametrize("control", CONTROLS)
def test_the_contract_tells_right_from_wrong(control, contract):
    for test in (EQUAL, SHARDED):
        outcome = "FAILED" if test in CONTROLS[control] else "PASSED"
        assert f"{outcome} tests/stages/test_contract.py::{test.format(control)}" in contract.stdout, contract.stdout
    assert len(re.findall(rf"^[A-Z]+ .*{re.escape(control)}-", contract.stdout, re.MULTILINE)) == 2, contract.stdout
