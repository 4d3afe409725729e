"""Level 3: the tests of tests/stages/test_contract.py, called on ranks as they are."""

import importlib
import inspect
import textwrap

from grade import on_ranks
from grade.grader import Failed, Wrong
from grade.levels import Check

CONTRACT = "tests.stages.test_contract"
# Level 1 counts the state, and allows uneven shares. `make test` holds which parameters are refused, by which error.
LEFT_OUT = {"test_state_is_sharded", "test_refuses_before_anything_changes"}


def level():
    """Return (title, checks) as in LEVELS. A check is a test that takes a stage and no other argument of pytest.

    Tests that run on ranks have `situations`, by tests/common.py.
    """
    checks = []
    for name, test in vars(importlib.import_module(CONTRACT)).items():
        if hasattr(test, "situations") and name not in LEFT_OUT:
            # {name of a mark of pytest: its arguments}; those of parametrize are a parameter's name and its values.
            marks = {mark.name: mark.args for mark in getattr(test, "pytestmark", [])}
            parameter, world_sizes = marks.get("parametrize", ("world_size", (2, 3)))
            if "any_size" in marks:
                world_sizes = 1, 2, 3, 4
            if parameter == "world_size" and "stage" in inspect.signature(test).parameters:
                checks.append(Check(name.removeprefix("test_").replace("_", " "), holds, name=name, test=test,
                                    world_sizes=world_sizes))
    return "Level 3: The whole contract", checks


def holds(grader, name, test, world_sizes):
    """Run a test on as many ranks as each of `world_sizes`. Its error becomes a Wrong with the test's docstring."""
    for world_size in world_sizes:
        try:
            grader.run(world_size, on_ranks.plays, CONTRACT, name)
        except Failed as failed:
            promise = (inspect.getdoc(test) or "no exception").splitlines()[0]
            expected = textwrap.shorten(promise, 98, placeholder=" …")  # a line of the verdict has 118 characters
            more = f'make test ARGS="{CONTRACT.replace(".", "/")}.py --stage {grader.package} -k {name}" shows more'
            raise Wrong(f"{expected} ({world_size} ranks)", failed.came, more) from None
