"""The chapters: built alike, and what they show of the code is in it. How long they may be says test_docs."""

import re
import shlex
import shutil
import textwrap

import pytest

from harness.publishing.stages import CORE
from show.page import SHOWN
from tests.common import STAGES
from tests.pages import Page
from tests.ranks import ROOT, run_module

OWN = "# not in the core"  # opens code that another test runs, see test_samples.py
HEADINGS = ["What is still wrong with {before}", "The idea", "The picture", "A walk through the core",
            "Predict, count, measure", "The bug that you will write", "Where it lives", "What is still wrong"]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

each_chapter = pytest.mark.parametrize("chapter", STAGES)


def page_of(chapter):
    return Page(f"{chapter}/README.md")


def parts_of(chapter):
    """Return {heading: what stands below it}, in the order of the page. A # in a block of code is no heading."""
    prose = FENCE.sub(lambda block: block[0].replace("\n#", "\n #"), page_of(chapter).text)
    _, *parts = re.split(r"^## (.*)\n", prose, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2]))


def sources_of(chapter):
    """Return the sources of the files that a reader opens."""
    paths = [ROOT / chapter / name for name in CORE]
    return [path.read_text(encoding="utf-8") for path in paths if path.exists()]


def is_in(code, source):
    """Whether `code` is a run of whole lines of `source`, where all lines may be indented further."""
    runs = (textwrap.indent(code.rstrip(), " " * columns) for columns in range(0, 20, 4))
    return any(f"\n{run}\n" in f"\n{source}" for run in runs)


@each_chapter
def test_all_chapters_are_built_alike(chapter):
    """Read a chapter: the idea must be one sentence in bold, and no table generated. Tables stand in results/, caveats
    in the reference, to which a chapter sends its reader once."""
    text = page_of(chapter).text
    parts = parts_of(chapter)
    number = STAGES.index(chapter)
    before = f"stage {number}" if number else "DDP"
    assert list(parts) == [heading.format(before=before) for heading in HEADINGS]
    assert len(re.findall(r"^> \*\*[^.*]+\.\*\*\n(?!>)", parts["The idea"], re.MULTILINE)) == 1
    assert "<!--" not in text
    assert "(../results/README.md" in text
    assert text.count("(../docs/reference.md)") == 1


@each_chapter
def test_code_in_a_chapter_is_code_of_its_core(chapter):
    blocks = page_of(chapter).code()
    assert blocks
    for code in blocks:
        is_of_the_core = any(is_in(code, source) for source in sources_of(chapter))
        assert is_of_the_core or code.startswith(OWN), f"not in the core:\n{code}"


@each_chapter
def test_the_walk_names_what_the_core_has(chapter):
    """Functions and classes of the core stand in bold where the walk first needs them."""
    source = "\n".join(sources_of(chapter))
    walk = FENCE.sub("", parts_of(chapter)["A walk through the core"])
    names = re.findall(r"\*\*`(\w+)`\*\*", walk)
    assert {"step", "sync_params"} <= set(names) or chapter == STAGES[1]
    assert all(re.search(rf"\b(def|class) {name}\b", source) for name in names)


# What a chapter asks its reader to break, by its name on docs/watch.html: part of the test's name, and what it shows.
# Left out is the bug that is a race (stage 4, the wrong bucket): it isn't seen in every run.
DIFFERS = r"parameter \S+ differs by \S+ from replicated training"
BUGS = {
    "1-copy": ("replicated", DIFFERS),
    "2-order": ("replicated", DIFFERS),
    "3-none": ("replicated", DIFFERS),
    "3-zero": ("five_things", r"'PARAMS'\] == "),
    "4-queue": ("leave_in_order", r"assert left == list\(range\(6\)\)"),
}


@pytest.mark.waits
@pytest.mark.parametrize("bug", BUGS)
def test_the_bug_of_a_chapter_is_seen_by_the_command_beside_it(bug, tmp_path):
    """Edit a copy of the repository, and run the tests that the chapter names: they must fail as it says.

    Without the edit these tests are green: they are in tests/stages/test_cores.py.
    """
    tests, failure = BUGS[bug]
    (program,) = [shown.program for shown in SHOWN if shown.id == bug]
    chapter = program.package
    file, before, after = program.edit
    for name in ("harness", "guard", "variants", "tests", *STAGES):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    core = tmp_path / chapter / file
    source = core.read_text(encoding="utf-8")
    assert source.count(before) == 1
    core.write_text(source.replace(before, after), encoding="utf-8")

    (arguments,) = re.findall(rf'make test ARGS="(.*{tests}.*)"', parts_of(chapter)["The bug that you will write"])
    if "--ranks" not in arguments:
        arguments += " --ranks 2"  # fewer than the reader's, for the sake of time
    run = run_module("pytest", "-p", "no:cacheprovider", "-x", *shlex.split(arguments), cwd=tmp_path)
    assert run.code == 1, run.stdout + run.stderr
    assert re.search(failure, run.stdout), run.stdout
