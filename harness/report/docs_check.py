"""Do the pages still say what is there? Every *.md of the project: links, names, commands, and how long the page is.

    python -m harness.report.docs_check          # or: make docs-check

What can be read off the files is a part of `make test` too, see `problems`: pages and #headings that are linked,
files and tests that are named, make's targets and variables, options, modules, samples of Python, words a page, and no
row of a table on two pages. Then this program runs every command that is quick in a small mode, see `quick`, in a copy
of the project, and compares what it prints with what the page shows below a line that begins with `$ `, figures aside.
Those that need root, a GPU or minutes are read only. Exit code: 0; 1 when a page is wrong; 2 for bad input.

What a page must know: a command stands in a block of its own or in a span of code; `my_…`, `…` and CAPITALS are the
reader's to fill in; files that the reader saves are named in a sample's first line or by "save … as"; a file of another
project is a link to it; a sample in a chapter that isn't its stage's code but for a line (a bug, say) is a ```diff.
"""

import argparse
import functools
import shutil
import sys
import tempfile
from pathlib import Path

from harness.report.command_checks import commands_exist
from harness.report.command_runs import quick, run
from harness.report.page_checks import (
    broken_links,
    gone_names,
    long_pages,
    rows_twice,
    unknown_names,
    wrong_quotes,
    wrong_samples,
)
from harness.report.project_files import ROOT, Project, pages
from harness.report.reading_time import words
from harness.run import command_line, signals


def problems(root=ROOT, of=None):
    """-> lines "PAGE:LINE: what is wrong"; of all pages, or of those whose names are in `of`."""
    every = pages(root)
    project = Project(root, every)
    found = []
    for page in every:
        if of is None or page.name in of:
            checks = (long_pages, broken_links, unknown_names, wrong_samples, wrong_quotes, gone_names, commands_exist)
            found += [f"{page.name}:{line}: {text}" for check in checks for line, text in check(page, project)]
    twice = [(page, *rest) for page, *rest in rows_twice(every)]
    return found + [f"{page.name}:{line}: {text}" for page, line, text in twice if of is None or page.name in of]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = functools.partial(command_line.fail, "docs")
    parser.add_argument("--pages", default="", metavar="TEXT", help="only pages whose name holds TEXT")
    args = parser.parse_args()
    chosen = [page for page in pages() if args.pages in page.name]
    if not chosen:
        parser.error(f"--pages {args.pages!r}: no page has that in its name")
    found = problems(of=[page.name for page in chosen])
    print(*found, sep="\n", end="\n" * bool(found))
    signals.exit_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        left_out = shutil.ignore_patterns(".venv", ".git", "__pycache__", "runs", "measured")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
        done = set()  # of two commands that are the same in small one is run
        for page in chosen:
            for command in page.commands():
                small = " ".join(quick(command.text) or [command.text])
                if small in done and not command.shown:
                    continue
                done.add(small)
                wrong = run(command, copy)
                outcome = {None: "read only", "": "as shown" if command.shown else "runs"}.get(wrong, wrong)
                print(f"{page.name}:{command.line}: {command.text}: {outcome}", flush=True)
                found += [wrong] * bool(wrong)
    for page in chosen:
        print(f"{page.name}: {words(page.text)} words")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
