"""What contributors rely on: which tests a command line chooses, what CI runs, and one version."""

import re
from types import SimpleNamespace

import pytest

import conftest
from tests.ranks import ROOT

CONTRACT, CORES, LAYOUT, HOUSE = (f"tests/stages/test_{name}.py" for name in ("contract", "cores", "layout", "house"))
CHOSEN = {  # what is named beside --stage -> of four files those whose tests are run
    ("tests/stages",): [CONTRACT],
    ("tests/house", "tests/stages"): [CONTRACT],
    (CORES,): [CORES],
    (f"{CORES}::test_a_core_adds_up_micro_batches[1]", LAYOUT): [CORES, LAYOUT],
}


@pytest.mark.parametrize("named", CHOSEN, ids=" ".join)
def test_files_that_are_named_win_over_the_contract(named):
    left_out, items = [], [SimpleNamespace(path=ROOT / file) for file in (CONTRACT, CORES, LAYOUT, HOUSE)]
    everything = list(items)
    config = SimpleNamespace(
        args=list(named), invocation_params=SimpleNamespace(dir=ROOT), getoption={"--stage": ["mine"]}.get,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)))
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.path for item in items] == [ROOT / file for file in CHOSEN[named]]
    assert len(items) + len(left_out) == len(everything) and not any(item in items for item in left_out)


def test_ci_runs_targets_of_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = {file: re.findall(r"^\s*(?:- run: )?make ([a-z-]+)", (ROOT / file).read_text(), re.MULTILINE)
              for file in (".ci/run", ".github/workflows/ci.yml")}
    assert called == {".ci/run": ["lint", "test"], ".github/workflows/ci.yml": ["check", "test", "faults"]}
    assert set(sum(called.values(), [])) <= set(targets)
