"""Level 3: tests of this repository on a package, with what fails counted by test."""

import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from grade.grader import shorten
from grade.left_over import MARK
from grade.skeleton import ROOT

TESTS = {False: "tests/stages/test_contract.py", True: "tests/stages/test_cores.py"}  # whether it is a core -> file
N_FAILURES = 40  # then it ends: a hang takes a minute
CAUSES = {  # a part of a failure -> its cause
    "unexpected keyword argument": "level 3's constructor and methods take more arguments: docs/guide.md lists them",
    "positional argument": "level 3's methods take more: step(closure), clip_grad_norm_(max_norm, norm_type)",
    "has no attribute": "level 3 asks for more methods: docs/guide.md lists them",
    "differs by": "a case of training that levels 1 and 2 don't have: the test's name says which",
}


def holds(package, arguments, is_core):
    """By pytest -> whether all have passed."""
    tests = TESTS[is_core]
    print(f"\nLevel 3: {'The tests of the cores' if is_core else 'The whole contract'} (minutes)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", tests, "--stage", package, *arguments, "-q", "--tb=short",
                   f"--maxfail={N_FAILURES}", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        ours = {name: value for name, value in os.environ.items() if name != MARK}  # its processes are pytest's
        run = subprocess.run(command, capture_output=True, text=True, env=ours)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [(case.get("name").partition("[")[0], fault) for case in cases
              for fault in [*case.iter("failure"), *case.iter("error")][:1]]
    if run.returncode == 0 and cases:
        print(f"  ok        {len(cases)} passed\nok level 3: the whole contract")
        return True
    if not failed:
        print(f"  FAILED    pytest could not run them\n            "
              f"{shorten(((run.stderr or run.stdout).strip().splitlines() or ['it says nothing'])[-1])}")
        return False
    counts = Counter(name for name, _ in failed)
    of_all = Counter(case.get("name").partition("[")[0] for case in cases)
    print(f"  FAILED    {len(failed)} of {len(cases)}: " + shorten(", ".join(
        f"{name} {count} of {of_all[name]}" for name, count in counts.most_common())))
    said = [(name, ((fault.get("message") or "").splitlines() or ["see below"])[0]) for name, fault in failed]
    known = [(cause, name, came) for name, came in said for part, cause in CAUSES.items() if part in came]
    cause, name, came = known[0] if known else ("", *said[0])
    print(f"  expected  {docstring_of(tests, name)}\n  came      {shorten(came)}")
    if cause:
        print(f"  cause     {cause}")
    print(f'  more      make test ARGS="{tests} --stage {package} -k {name}"')
    return False


def docstring_of(tests, name):
    """-> what a test holds: the first line of its docstring, or its name in words."""
    functions = {node.name: node for node in ast.parse((ROOT / tests).read_text(encoding="utf-8")).body
                 if isinstance(node, ast.FunctionDef)}
    words = name.removeprefix("test_").replace("_", " ")
    said = ast.get_docstring(functions[name]) if name in functions else None
    return shorten(f"{words}: {said.splitlines()[0]}" if said else words)
