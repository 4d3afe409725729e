"""Grades a sharded optimizer of your own, in three levels; the first check that fails ends it, with the likely cause.

    make grade STAGE=my_package      a package or a module in the current folder; STAGE=3: a stage of this repository

Level 1, it trains: by hand, like one process, state 1/d, what it sends. Level 2, it is an optimizer: groups,
schedulers, accumulation, clipping, saving. Level 3, the whole contract: tests/stages/test_contract.py.
docs/exercise.md has the interface that each level asks for, and exercises.
Options that are not ours go to level 3's pytest. A package with a ShardedOptimizer only, a core, is graded by what a
core has.
Exit code: 0; 1 when a check fails; 2 when there is nothing to grade.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

from harness.run import cli  # first: from here on Ctrl-C is one word

from grade import on_ranks
from grade.grader import Grader, Wrong
from grade.levels import LEVELS

ROOT = Path(__file__).resolve().parents[1]
fail = functools.partial(cli.fail, "grade")


def package_of(stage):
    """-> the name of a package: that of a stage's number, or `stage` itself."""
    if stage.isdecimal():
        folders = sorted(ROOT.glob(f"stage{stage}_*"))
        return folders[0].name if folders else fail(f"STAGE={stage}: there are stages 1 to 4")
    package = stage.removesuffix("/").removesuffix(".py").replace("/", ".")
    found = None
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        found = importlib.util.find_spec(package)
    return package if found else fail(f"STAGE={stage}: no package or module of that name in {Path.cwd().name}/")


def check_import(package):
    """End here with the last line of what the import raises."""
    try:
        on_ranks.class_of(package)
    except Exception as error:
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(os.getcwd())]
        line = traceback.format_exception_only(error)[-1].strip()
        where = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else \
            f"{ours[-1].filename}:{ours[-1].lineno}" if ours else package
        fail(f"{package} can't be imported: {line} ({where.removeprefix(os.getcwd() + os.sep)})")


def passes(level, grader, only=""):
    """Runs the checks of `level` whose name has `only` in it, prints a line for each -> whether all have passed."""
    title, checks = LEVELS[level]
    checks = [(name, check) for name, check, is_of in checks if only in name and is_of(grader.cls)]
    if checks:
        print(f"\nLevel {level}: {title}")
    for name, check in checks:
        try:
            notes = check(grader) or []
        except Wrong as wrong:
            print(f"  FAILED    {name}")
            for what, line in wrong.lines:
                print(f"  {what:9} {line}", flush=True)
            return False
        print(f"  ok        {name}", flush=True)
        for note in notes:
            print(f"            {note}")
    return True


def contract_holds(package, arguments):
    """The contract's tests by pytest, up to the third that fails -> whether all have passed."""
    print("\nLevel 3: The whole contract (minutes)", flush=True)
    command = [sys.executable, "-m", "pytest", "tests/stages/test_contract.py", "--stage", package, *arguments]
    run = subprocess.run([*command, "-q", "--tb=no", "-rfE", "--maxfail=3", "-p", "no:cacheprovider"],
                         capture_output=True, text=True, env={**os.environ, "COLUMNS": "400"})
    counts = re.findall(r"\d+ (?:passed|failed|errors?)", run.stdout.splitlines()[-1] if run.stdout else "")
    if run.returncode == 0:
        print(f"  ok        {', '.join(counts)}")
        return True
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?::(.*)$", run.stdout, re.MULTILINE)
    print(f"  FAILED    {', '.join(counts) or 'pytest could not run them'}")
    for line in failed[:3] or (run.stderr or run.stdout).strip().splitlines()[-1:]:
        print(f"            {line[:200]}")
    print(f'  more      make test ARGS="--stage {package}"')
    return False


def main():
    parser = argparse.ArgumentParser(prog="grade", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("stage", help="1 to 4, or the name of a package or module in the current folder")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks with TEXT in their name, of levels 1 and 2")
    parser.add_argument("--levels", type=int, choices=[1, 2, 3], default=3, help="up to this one (default 3)")
    args, for_pytest = parser.parse_known_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU, on every machine
    sys.path.insert(0, os.getcwd())
    package = package_of(args.stage)
    check_import(package)
    grader = Grader(package)
    cls = grader.cls
    print(f"Grading {cls.__name__ + ' of ' if cls else ''}{package}", flush=True)
    try:
        for level in (1, 2):
            if level <= args.levels and not passes(level, grader, args.only):
                return 1
    finally:
        grader.close()
    if args.only:
        return 0
    if grader.is_core:
        print("\nA ShardedOptimizer, a core: no_sync, clipping, saving and level 3 are for a DistributedOptimizer.")
    elif args.levels == 3 and not contract_holds(package, for_pytest):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
