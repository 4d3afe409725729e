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
    """An idea stands in one sentence in bold. No table is generated: tables stand in results/, caveats in the
    reference, to which a chapter sends its reader once."""
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
    for code in [code for code in blocks if not code.startswith(OWN)]:
        assert any(is_in(code, source) for source in core_of(chapter).values()), f"not in the core:\n{code}"


@each_chapter
def test_the_walk_names_what_the_core_has(chapter):
    """Functions and classes of the core stand in bold where the walk first needs them."""
    source = "\n".join(core_of(chapter).values())
    walk = FENCE.sub("", parts_of(chapter)["A walk through the core"])
    names = re.findall(r"\*\*`(\w+)`\*\*", walk)
    assert {"step", "sync_params"} <= set(names) or chapter == STAGES[1]
    assert [name for name in names if not re.search(rf"\b(def|class) {name}\b", source)] == []


def test_the_example_of_chapter_4_adds_up():
    """The milliseconds that the chapter names follow from those that it assumes.

    A bucket leaves when its layer has ended and the link is free. A layer begins when its parameters have arrived and
    the layer before it has ended.
    """
    n_layers = 4
    forward_ms = 1
    backward_ms = 2
    message_ms = 1.5
    grads_ms = 0.0
    params_ms = 0.0
    forward_end_ms = 0.0
    for layer in range(n_layers):
        grads_ms = max(grads_ms, (layer + 1) * backward_ms) + message_ms
        params_ms += message_ms
        forward_end_ms = max(forward_end_ms, params_ms) + forward_ms
    in_turns_ms = n_layers * (forward_ms + backward_ms + 2 * message_ms)
    bound_ms = n_layers * (max(forward_ms, message_ms) + max(backward_ms, message_ms))
    text = parts_of(STAGES[3])["The idea"]
    for milliseconds in (in_turns_ms, grads_ms, forward_end_ms, grads_ms + forward_end_ms, bound_ms):
        assert f"{milliseconds:g} ms" in text, milliseconds


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
