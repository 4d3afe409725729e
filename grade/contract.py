"""Runs level 3: tests of this repository on a package, with what fails counted by test."""

import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from grade.grader import MARK, say, shorten
from harness.publishing.stages import ROOT

N_FAILURES = 40  # then it ends: a hang takes a minute
CAUSES = {  # a part of a failure -> its cause
    "unexpected keyword argument": "level 3's constructor and methods take more arguments: docs/guide.md lists them",
    "positional argument": "level 3's methods take more: step(closure), clip_grad_norm_(max_norm, norm_type)",
    "has no attribute": "level 3 asks for more methods: docs/guide.md lists them",
    "differs by": "a case of training that levels 1 and 2 don't have: the test's name says which"}


def holds(package, arguments, is_core):
    """Run the tests by pytest -> whether all have passed."""
    tests, title = "tests/stages/test_contract.py", "The whole contract"
    if is_core:
        tests, title = "tests/stages/test_cores.py", "The tests of the cores"
    print(f"\nLevel 3: {title} (minutes)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        run = subprocess.run(
            [sys.executable, "-m", "pytest", tests, "--stage", package, *arguments, "-q", "--tb=short",
             f"--maxfail={N_FAILURES}", "-p", "no:cacheprovider", f"--junit-xml={report}"], capture_output=True,
            text=True, env={name: value for name, value in os.environ.items() if name != MARK})  # what it starts is its
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    names = [case.get("name").partition("[")[0] for case in cases]
    failures = [(name, (fault.get("message") or "see below").splitlines()[0]) for name, case in zip(names, cases)
                for fault in case if fault.tag in ("failure", "error")]
    if run.returncode == 0 and cases:
        say(("ok", f"{len(cases)} passed"))
        print("ok level 3: the whole contract")
    elif failures:
        explain(tests, package, Counter(names), failures)
    else:
        last_line = ((run.stderr or run.stdout).strip().splitlines() or ["it says nothing"])[-1]
        say(("FAILED", "pytest could not run them"), ("", shorten(last_line)))
    return run.returncode == 0 and bool(cases)


def explain(tests, package, counts, failures):
    """Print each test that fails, of `counts` runs, and more of one: the first whose cause is known, or the first."""
    known = [(test, came, [("cause", cause)]) for test, came in failures for part, cause in CAUSES.items()
             if part in came]
    test, came, cause = (known or [(*failures[0], [])])[0]
    docstrings = [ast.get_docstring(node) for node in ast.parse((ROOT / tests).read_text(encoding="utf-8")).body
                  if isinstance(node, ast.FunctionDef) and node.name == test]
    expected = [test.removeprefix("test_").replace("_", " "), *(text.splitlines()[0] for text in docstrings if text)]
    say(("FAILED", f"{len(failures)} of {counts.total()}"),
        *(("", f"{test} {n} of {counts[test]}") for test, n in Counter(test for test, _ in failures).most_common()),
        ("expected", shorten(": ".join(expected))), ("came", shorten(came)), *cause,
        ("more", f'make test ARGS="{tests} --stage {package} -k {test}"'))
