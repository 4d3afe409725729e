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

CONTRACT, CORES, HOUSE = (f"tests/stages/test_{name}.py" for name in ("contract", "cores", "house"))


def item(file, **params):
    return SimpleNamespace(path=ROOT / file, callspec=SimpleNamespace(params=params))


@pytest.mark.parametrize("source, kept", [("TESTPATHS", ["of the contract"]), ("ARGS", ["of the contract", "of mine"])])
def test_with_a_stage_files_that_are_named_win_over_the_contract(source, kept):
    """Of them what is about that stage. pytest gives the tests of named files only."""
    items = {"of the contract": item(CONTRACT, stage="mine"), "of mine": item(CORES, stage="mine"),
             "of stage 4": item(CORES, stage="stage4_overlap"), "of no stage": item(HOUSE)}
    left_out, run = [], list(items.values())
    config = SimpleNamespace(
        args_source=pytest.Config.ArgsSource[source], getoption={"--stage": ["mine"]}.get,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)))
    conftest.pytest_collection_modifyitems(config, run)
    assert run == [items[name] for name in kept]
    assert left_out == [items[name] for name in items if name not in kept]


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


METHODS = ["__init__", "clip_grad_norm_", "finish_grad_sync", "no_sync"]
FACE += [getattr(optimizer_of(stage), name) for stage in STAGES for name in METHODS]


@pytest.mark.parametrize("function", FACE, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_the_public_face_has_types(function):
    signature = inspect.signature(function)
    assert all(parameter.annotation is not parameter.empty for name, parameter in signature.parameters.items()
               if name != "self"), signature
    assert signature.return_annotation is not signature.empty
