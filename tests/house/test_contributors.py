"""What contributors rely on: which tests a command line chooses, what CI runs, and one version."""

import inspect
import re
import sys
from types import SimpleNamespace

import pytest

import checkpoint
import conftest
from tests.common import STAGES, optimizer_of
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


@pytest.mark.parametrize("stage", STAGES)
def test_there_is_one_version(stage):
    """Of pyproject.toml, of each stage, which goes elsewhere alone, and on top of the changelog."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    package = optimizer_of(stage).__module__.split(".")[0]
    assert sys.modules[package].__version__ == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


FACE = [checkpoint.full_state_dict, checkpoint.load_full_state_dict, checkpoint.save, checkpoint.load,
        checkpoint.latest, checkpoint.reshard]


@pytest.mark.parametrize("function", FACE, ids=lambda function: function.__name__)
def test_a_public_function_of_checkpoint_has_types(function):
    signature = inspect.signature(function)
    assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())
    assert signature.return_annotation is not signature.empty
