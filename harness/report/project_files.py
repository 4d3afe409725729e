"""What the project has: files that git doesn't ignore, pages, targets, options, tests."""

import fnmatch
import os
import re
from pathlib import Path

from harness.report.markdown import Page

ROOT = Path(__file__).resolve().parents[2]


def pages(root=ROOT):
    """Every *.md that git doesn't ignore -> list of Pages."""
    return [Page(root / name, root) for name in sorted(contents(root)[0]) if name.endswith(".md")]


def contents(root):
    """-> (files, folders), paths from `root` on with / between the parts; without what is_ignored."""
    files, folders, patterns = set(), set(), ignored_patterns(root)
    for folder, inner, names in os.walk(root):
        here = Path(folder).relative_to(root)
        inner[:] = [name for name in inner if not is_ignored(here / name, patterns)]  # os.walk goes into no others
        folders.update((here / name).as_posix() for name in inner)
        files.update((here / name).as_posix() for name in names if not is_ignored(here / name, patterns))
    return files, folders


def ignored_patterns(root):
    ignore = root / ".gitignore"
    return [line.rstrip("/") for line in ignore.read_text(encoding="utf-8").split()] if ignore.exists() else []


def is_ignored(path, patterns):
    """`path`: from the root on. Whether git takes it out of the project, or a name that begins with a dot."""
    return any(part.startswith(".") and part != ".." for part in path.parts) or any(
        fnmatch.fnmatch(name, pattern) for pattern in patterns for name in (*path.parts, path.as_posix()))


class Project:
    """What pages may name.

    Attributes:
        files, folders: see `contents`.
        tests: names of test functions and of files of tests.
        options: --name, of every program and of conftest.py.
        targets, variables: of the Makefile.
        of_readers: files that a page has its reader save: named in the first line of a sample, or in "save … as".
    """

    def __init__(self, root, every):
        self.root = root
        self.of_readers = {name for page in every for name in (
            *re.findall(r"^```python\n# (\w+\.py)$", page.text, re.MULTILINE),
            *re.findall(r"\b[Ss]ave [^.`]+ as `(\w+\.py)`", page.text))}
        self.files, self.folders = contents(root)
        self.ignored = ignored_patterns(root)
        sources = {name: (root / name).read_text(encoding="utf-8") for name in self.files if name.endswith(".py")}
        tests = [name for name in sources if name.startswith("tests/")]
        self.tests = {Path(name).stem for name in tests} | {
            test for name in tests for test in re.findall(r"def (test_\w+)", sources[name])}
        self.options = {option for source in sources.values() for option in re.findall(r"[\"'](--[\w-]+)[\"']", source)}
        self.sources = "\n".join(source for name, source in sources.items() if not name.startswith("tests/"))
        makefile = root / "Makefile"
        text = makefile.read_text(encoding="utf-8") if makefile.exists() else ""
        self.targets = set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))
        self.variables = set(re.findall(r"^(?:export )?([A-Z_]+) *\?=", text, re.MULTILINE)) | set(
            re.findall(r"\$\(([A-Z_]+)\)", text))

    def has(self, name, beside):
        """Whether a file or folder is called `name`, from the root on or from the folder `beside` on, or ends so."""
        name = name.rstrip("/")
        known = self.files | self.folders | self.of_readers
        return (name in known or os.path.normpath(os.path.join(beside, name)).replace(os.sep, "/") in known
                or any(one.endswith(f"/{name}") for one in known) or is_ignored(Path(name), self.ignored))


def is_placeholder(text):
    return "…" in text or "..." in text or "my_" in text or re.search(r"\b[A-Z]{2,}\b", text) is not None
