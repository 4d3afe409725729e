"""What contributors rely on: which tests a command line chooses, what CI runs, and one version."""

import re
import subprocess
import sys

import pytest

from tests.common import STAGES
from tests.ranks import ROOT

CHOSEN = {  # what is named beside --stage -> the files whose tests are run
    ("tests/house", "tests/stages"): {"tests/stages/test_contract.py"},
    ("tests/stages/test_cores.py::test_a_core_adds_up_micro_batches", "tests/stages/test_layout.py"):
        {"tests/stages/test_cores.py", "tests/stages/test_layout.py"},
}


@pytest.mark.slow
@pytest.mark.parametrize("named", CHOSEN, ids=["folders", "files"])
def test_files_that_are_named_win_over_the_contract(named):
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--stage", STAGES[0], *named]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {line.split("::")[0] for line in shown.splitlines() if "::" in line} == CHOSEN[named]


def test_ci_runs_targets_of_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = {file: re.findall(r"^\s*(?:- run: )?make ([a-z-]+)", (ROOT / file).read_text(), re.MULTILINE)
              for file in (".ci/run", ".github/workflows/ci.yml")}
    assert called == {".ci/run": ["lint", "test"], ".github/workflows/ci.yml": ["check", "test", "faults"]}
    assert set(sum(called.values(), [])) <= set(targets)
