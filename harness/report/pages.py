"""Tables and pictures of the pages, anew from results/*.json.

    python -m harness.report [--publish]        # or: make report, make report PUBLISH=1

writes what stands in README.md, docs/plan.md and results/*.md between a line that says <!-- report: NAME --> and
<!-- end -->. NAME is one of BLOCKS or MARKDOWN. No figure between these lines is typed by hand. PICTURES are drawn
anew too. What you have measured yourself lies in measured/: it is printed beside what is published, and --publish puts
it in its place.
"""

import argparse
import functools
import re

from harness.report import published, yours
from harness.report.blocks import BLOCKS, MARKDOWN, PICTURES
from harness.report.sheet import sheet_text
from harness.run import command_line
from harness.run.files import write

COLUMNS = 110  # of a table that stands in the terminal only


def rewritten(text):
    """`text` of a markdown file, with all its blocks made anew. An unknown name raises KeyError."""
    def block(match):
        start, name, end = match.groups()
        lines = "\n\n".join({**BLOCKS, **MARKDOWN}[name]()).splitlines()
        indent = "" if name in MARKDOWN else "    "
        return "\n".join([start, *(f"{indent}{line}".rstrip() for line in lines), "", end])
    return re.sub(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)", block, text, flags=re.DOTALL)


def files():
    """Pages that have blocks."""
    root = published.ROOT
    return [root / "README.md", root / "docs" / "plan.md", *sorted((root / "results").glob("*.md"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = functools.partial(command_line.fail, "report")
    parser.add_argument("--publish", action="store_true", help="first put what is in measured/ into results/")
    if parser.parse_args().publish:
        print(*yours.publish(), sep="\n")
    rewrite()
    for sheet in yours.sheets():
        print("", sheet_text(sheet, COLUMNS), sep="\n")


def rewrite():
    """Pages and pictures, and says of each whether it has changed."""
    texts = []  # nothing is written before all of it is there
    for path in [*files(), *(published.ROOT / "results" / name for name in PICTURES)]:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            texts.append((path, before, PICTURES[path.name]() if path.name in PICTURES else rewritten(before)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"there is no such block, or results/ holds something else than results: {error!r}"
            raise SystemExit(f"report: {path.name}: {reason}") from None
    for path, before, after in texts:
        if after != before:
            write("page", path, after, functools.partial(command_line.fail, "report"))
        print(f"{path.relative_to(published.ROOT)}: {'unchanged' if after == before else 'rewritten'}")
