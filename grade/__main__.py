"""Grades a sharded optimizer of your own, in three levels.

Grading stops at the first check that fails, and prints its likely cause.

    make grade STAGE=my_package      a package or a module in the current folder; STAGE=3: a stage of this repository

Level 1: it trains as one process does, each of d ranks keeps 1/d of the optimizer's state, and sends few bytes.
Level 2: it works as an optimizer of torch, with groups, schedulers, accumulation, clipping and saving.
Level 3: it passes tests/stages/test_contract.py, which each stage of this repository passes.
docs/exercise.md has the interface that each level asks for, and exercises. STAGE=mine.ring grades exercise 0, a ring
all-reduce. A drill is a stage with a planted fault, made by `make exercise STAGE=drill1`. You mend the fault; the
verdict is that the drill is mended, or a hint.
Exit code: 0; 1 when a check fails, or no check could run; 2 when there is nothing to grade.
"""

import contextlib
import functools
import os
import sys
import time
from pathlib import Path

from grade import exercises
from harness import STAGES
from harness.ranks import command_line
from harness.ranks.forkserver import start_forkserver

fail = functools.partial(command_line.fail, "grade")  # fail(message) prints a line, and ends the program: exit code 2


def package_of(stage):
    """Return the name of the package or module that the learner means by STAGE: a number, a name or a path.

    Call `fail` if no such package exists. The package is not imported, because its code may end this process.
    """
    if stage.isdecimal():
        for name in STAGES:
            if name.startswith(f"stage{stage}_"):
                return name
        fail(f"STAGE={stage}: there are stages 1 to {len(STAGES)}")
    package = stage.removesuffix("/").removesuffix(".py").replace("/", ".")
    is_name = all(map(str.isidentifier, package.split(".")))
    if not is_name or not any(files_of(package, folder) for folder in sys.path):
        fail(f"STAGE={stage}: no package or module of that name in {Path.cwd().name}/")
    return package


def files_of(package, folder=""):
    """Return the Python files of `package` in `folder`, which --watch watches; [] if there is no such package.

    For a package: all files below its folder. For a module in a package: all files of the folder, because the module
    may import the others. For any other module: its own file.
    """
    path = Path(folder, *package.split("."))
    if path.is_dir():
        return sorted(path.rglob("*.py"))
    module = path.with_suffix(".py")
    if not module.is_file():
        return []
    return sorted(module.parent.glob("*.py")) if "." in package else [module]


def when_saved(package):
    """Return {file of a package: time of its last save}. Return None if a file vanishes: an editor is replacing it."""
    with contextlib.suppress(OSError):
        return {file: file.stat().st_mtime_ns for file in files_of(package)}


def watch(package, args):
    """Grade at each save, on ranks that were started before the save. Ctrl-C ends this."""
    from grade import report  # these load torch, which takes seconds
    from grade.grader import Grader

    graded = None  # what when_saved() has returned for the latest verdict; None: there was no verdict yet
    while True:
        grader = Grader(package)
        grader.start()
        saved = when_saved(package)
        while saved in (None, graded):  # an editor is replacing a file, or nothing was saved since the last verdict
            time.sleep(0.1)
            saved = when_saved(package)
        graded = saved
        begin = time.monotonic()
        report.grade(grader, args)
        print(f"{time.monotonic() - begin:.1f} s; the next save is graded, too. Ctrl-C ends this.", flush=True)
        grader.close()


def main():
    """Grade as the command line says; return the exit code."""
    parser = command_line.Parser("grade", __doc__)
    add = parser.add_argument
    add("stage", help=f"1 to {len(STAGES)}, or the name of a package or module in the current folder")
    add("--only", default="", metavar="TEXT", help="checks with TEXT in their name, of levels 1 and 2")
    add("--levels", type=int, choices=[1, 2, 3], default=3, help="up to this one (default 3)")
    add("--watch", action="store_true", help="grade again at each save")
    # 1 prints a user's report of the drill's fault, 2 also the check that fails, 3 also which values to compare.
    add("--hint", type=int, choices=[1, 2, 3], default=1,
        help="of a drill: the report, the check, the state (default 1)")
    add("--answer", action="store_true", help="of a drill: what it was, and where")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU, on every machine
    sys.path.insert(0, os.getcwd())
    package = package_of(args.stage)
    if args.answer:
        number = exercises.number_of_drill(package) or fail(f"STAGE={args.stage}: --answer is for a drill")
        print(exercises.answer(number))
        return 0
    print(f"Grading {package}: torch is loaded first, which takes seconds", flush=True)
    # The fork server is a process that loads torch and forks the ranks. It loads these modules while this process
    # loads torch.
    start_forkserver(("torch._dynamo", "grade.on_ranks"))
    if args.watch:
        return watch(package, args)
    from grade import report  # these load torch, which takes seconds
    from grade.grader import Grader

    grader = Grader(package)  # report.grade starts it
    try:
        # report.grade returns None where level 1 has passed, and the class is no torch.optim.Optimizer. Then it was
        # written for level 1 alone: that is no failure.
        return 1 if report.grade(grader, args) is False else 0
    finally:
        grader.close()


if __name__ == "__main__":
    command_line.begin()  # from here on, Ctrl-C ends the program with one word in place of a traceback
    sys.exit(main())
