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
HEADINGS = ["What is still wrong with {before}", "New words", "The idea", "The picture", "A walk through the core",
            "Predict, count, measure", "The bug that you will write", "Where it lives", "What is still wrong"]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

each_chapter = pytest.mark.parametrize("chapter", STAGES)


def page_of(chapter):
    return Page(f"{chapter}/README.md")


def parts_of(chapter):
    """-> heading: what stands below it, in the order of the page. A # in a block of code is no heading."""
    prose = FENCE.sub(lambda block: block[0].replace("\n#", "\n #"), page_of(chapter).text)
    _, *parts = re.split(r"^## (.*)\n", prose, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2]))


def core_of(chapter):
    """-> name: source, of the files that a reader opens."""
    paths = [ROOT / chapter / name for name in CORE]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.exists()}


def is_in(code, source):
    """Whether `code` is a run of whole lines of `source`, indentation that all its lines share aside."""
    runs = (textwrap.indent(code.rstrip(), " " * columns) for columns in range(0, 20, 4))
    return any(f"\n{run}\n" in f"\n{source}" for run in runs)


@each_chapter
def test_all_chapters_are_built_alike(chapter):
    """Their parts, in their order; the idea opens with one sentence in bold; each new word has a line. No table is
    generated: they stand in results/, and caveats in the reference, to which a chapter sends its reader once."""
    text, parts, number = page_of(chapter).text, parts_of(chapter), STAGES.index(chapter)
    before = f"stage {number}" if number else "DDP"
    assert text.startswith(f"# Stage {number + 1}: ")
    assert list(parts) == [heading.format(before=before) for heading in HEADINGS]
    assert re.match(r"\s*> \*\*[^.*]+\.\*\*\n(?!>)", parts["The idea"]), parts["The idea"]
    words = [line for line in parts["New words"].splitlines() if line and not line.startswith("  ")]
    assert words and all(re.match(r"- \*\*[^*]+\*\*", line) for line in words), words
    assert "<!--" not in text and "(../results/README.md)" in text and text.count("(../docs/reference.md)") == 1


@each_chapter
def test_code_in_a_chapter_is_code_of_its_core(chapter):
    blocks = page_of(chapter).code()
    assert blocks
    for code in [code for code in blocks if not code.startswith(OWN)]:
        assert any(is_in(code, source) for source in core_of(chapter).values()), f"not in the core:\n{code}"


@each_chapter
def test_the_walk_names_what_the_core_has_in_the_order_of_its_files(chapter):
    """Names in bold, from one subheading to the next. A chapter may go on to another file, and not back."""
    source = "\n".join(core_of(chapter).values())
    walk = FENCE.sub("", parts_of(chapter)["A walk through the core"])
    for stretch in re.split(r"^### .*\n", walk, flags=re.MULTILINE):
        names = re.findall(r"\*\*`(\w+)`\*\*", stretch)
        in_order = "".join(rf".*?\b(def|class) {name}\b" for name in names)
        assert re.match(in_order, source, re.DOTALL), f"not so in the core of {chapter}: {names}"


def test_the_picture_of_the_five_states_is_that_of_the_code():
    (picture, *_) = Page("page.md", parts_of(STAGES[2])["The picture"]).code("text")
    assert is_in(textwrap.dedent(picture), core_of(STAGES[2])["buffer.py"])


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
    """In a copy of the repository. Without the edit the same tests are green: tests/stages/test_cores.py has them."""
    tests, shown = BUGS[bug]
    (program,) = [one.program for one in SHOWN if one.id == bug]
    chapter, (file, before, after) = program.package, program.edit
    for name in ("harness", "guard", "variants", "tests", *STAGES):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    core = tmp_path / chapter / file
    source = core.read_text(encoding="utf-8")
    assert source.count(before) == 1
    core.write_text(source.replace(before, after), encoding="utf-8")

    (arguments,) = re.findall(rf'make test ARGS="(.*{tests}.*)"', parts_of(chapter)["The bug that you will write"])
    ranks = [] if "--ranks" in arguments else ["--ranks", "2"]  # fewer than the reader's, for the sake of time
    run = run_module("pytest", "-p", "no:cacheprovider", "-x", *shlex.split(arguments), *ranks, cwd=tmp_path)
    assert run.code == 1, run.stdout + run.stderr
    assert re.search(shown, run.stdout), run.stdout
