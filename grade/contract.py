"""Makes level 3 of the grader: it runs the tests of tests/stages/test_contract.py on a learner's package.

Pytest runs such a test on several processes, the ranks, and passes the tested package's name as the argument `stage`.
Here the Grader, which keeps ranks of its own, calls the test on them, with the learner's package as `stage`.
"""

import importlib
import inspect
import textwrap

from grade import on_ranks
from grade.grader import Failed, Wrong
from grade.levels import Check

CONTRACT = "tests.stages.test_contract"
LEFT_OUT = {
    # Level 1 counts the state already, and allows ranks to have unequal shares, which this test forbids.
    "test_state_is_sharded",
    # It demands a certain error for each parameter that our stages refuse; a learner's package may accept them.
    "test_refuses_before_anything_changes"}


def level():
    """Return (title, Checks) of level 3. A Check has a name, a function and the function's settings.

    Each test of the contract becomes a Check, if it runs on ranks and needs no argument that only pytest can give.
    """
    checks = []
    for name, test in vars(importlib.import_module(CONTRACT)).items():
        # A test that runs on ranks has the attribute `situations`, which its decorator from tests/common.py has set.
        if hasattr(test, "situations") and name not in LEFT_OUT:
            # {name: arguments} of the marks, which decorators @pytest.mark.NAME(arguments) have set.
            marks = {mark.name: mark.args for mark in getattr(test, "pytestmark", [])}
            # The mark parametrize has a parameter of the test, and its values. A test without it has 2 and 3 ranks.
            parameter, world_sizes = marks.get("parametrize", ("world_size", (2, 3)))
            if "any_size" in marks:  # the mark of a test that holds on any number of ranks
                world_sizes = 1, 2, 3, 4
            # Where the mark names another parameter than world_size, only pytest can give its values.
            if parameter == "world_size" and "stage" in inspect.signature(test).parameters:
                words = name.removeprefix("test_").replace("_", " ")
                # The arguments after `holds` are passed to it.
                checks.append(Check(words, holds, name=name, test=test, world_sizes=world_sizes))
    return "Level 3: The whole contract", checks


def holds(grader, name, test, world_sizes):
    """Run the test `name` on the ranks of `grader`, once for each number of ranks in `world_sizes`.

    If it fails, raise Wrong, a verdict: what was expected, what came instead, and, in place of a cause, a command that
    shows more. The first line of the test's docstring says what was expected.
    """
    for world_size in world_sizes:
        try:
            # Each rank imports the file of the contract, and calls the test.
            grader.run(world_size, on_ranks.plays, CONTRACT, name)
        except Failed as failed:  # an exception, a death or a hang on a rank, which failed.came describes
            promise = (inspect.getdoc(test) or "no exception").splitlines()[0]
            expected = textwrap.shorten(promise, 98, placeholder=" …")  # a line of the verdict has 118 characters
            more = f'make test ARGS="{CONTRACT.replace(".", "/")}.py --stage {grader.package} -k {name}" shows more'
            raise Wrong(f"{expected} ({world_size} ranks)", failed.came, more) from None
