"""The chapters: short, built alike, and what they show of the code is in it."""

import ast
import itertools
import re
import shlex
import shutil
import textwrap

import pytest

from tests.common import STAGES
from tests.ranks import ROOT, run_module

WORDS = dict(zip(STAGES, (600, 520, 950, 1300)))  # at the most, outside of code and tables
OWN = "# not in the core"  # opens code that another test runs, see test_samples.py
HEADINGS = [
    "What is still wrong with {before}",
    "New words",
    "The idea",
    "The picture",
    "A walk through the core",
    "Predict, count, measure",
    "The bug that you will write",
    "Where it lives",
    "What is still wrong",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CORE_FILES = ("optimizer.py", "buffer.py", "transport.py")

each_chapter = pytest.mark.parametrize("chapter", STAGES)


def text_of(chapter):
    return (ROOT / chapter / "README.md").read_text(encoding="utf-8")


def parts_of(chapter):
    """-> heading: what stands below it, in the order of the page. A # in a block of code is no heading."""
    prose = FENCE.sub(lambda block: block[0].replace("\n#", "\n #"), text_of(chapter))
    _, *parts = re.split(r"^## (.*)\n", prose, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2]))


def core_of(chapter):
    """-> name: source, of the files that a reader opens."""
    paths = [ROOT / chapter / name for name in CORE_FILES]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.exists()}


def definitions_of(chapter):
    """-> name: [(file, line)] of each class, function and method of the core. A name may be defined more than once."""
    found = {}
    for file, source in core_of(chapter).items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found.setdefault(node.name, []).append((file, node.lineno))
    return found


def is_in(code, source):
    """Whether `code` is a run of whole lines of `source`, indentation that all its lines share aside."""
    wanted = code.rstrip().splitlines()
    lines = source.splitlines()
    runs = (lines[start : start + len(wanted)] for start in range(len(lines) - len(wanted) + 1))
    return any(textwrap.dedent("\n".join(run)).splitlines() == wanted for run in runs)


@each_chapter
def test_a_chapter_is_short(chapter):
    lines = FENCE.sub("", text_of(chapter)).splitlines()
    n_words = sum(len(line.split()) for line in lines if not line.startswith("    ") and " | " not in line)
    assert n_words <= WORDS[chapter], f"{chapter}/README.md has {n_words} words"


@each_chapter
def test_all_chapters_have_the_same_parts_in_the_same_order(chapter):
    before = ["DDP", "stage 1", "stage 2", "stage 3"][STAGES.index(chapter)]
    assert list(parts_of(chapter)) == [heading.format(before=before) for heading in HEADINGS]
    assert re.match(rf"# Stage {STAGES.index(chapter) + 1}: ", text_of(chapter))


@each_chapter
def test_the_idea_begins_with_one_sentence_in_bold(chapter):
    quote = re.match(r"\s*((> .*\n)+)", parts_of(chapter)["The idea"])[1]
    sentence = " ".join(line.removeprefix("> ") for line in quote.splitlines())
    assert re.fullmatch(r"\*\*[^.*]+\.\*\*", sentence), sentence


@each_chapter
def test_new_words_are_a_list_with_a_term_a_line(chapter):
    lines = [line for line in parts_of(chapter)["New words"].splitlines() if line and not line.startswith("  ")]
    assert lines and all(re.match(r"- \*\*[^*]+\*\*", line) for line in lines), lines


@each_chapter
def test_code_in_a_chapter_is_code_of_its_core(chapter):
    blocks = [code for language, code in FENCE.findall(text_of(chapter)) if language == "python"]
    assert blocks
    for code in [code for code in blocks if not code.startswith(OWN)]:
        assert any(is_in(code, source) for source in core_of(chapter).values()), f"not in the core:\n{code}"


@each_chapter
def test_the_walk_names_what_the_core_has_in_the_order_of_its_files(chapter):
    """Names in bold, from one subheading to the next. A chapter may go on to another file, and not back."""
    definitions = definitions_of(chapter)
    walk = FENCE.sub("", parts_of(chapter)["A walk through the core"])
    for stretch in re.split(r"^### .*\n", walk, flags=re.MULTILINE):
        places = []
        for name in re.findall(r"\*\*`(\w+)`\*\*", stretch):
            assert name in definitions, f"the core of {chapter} has no {name}"
            places.append(definitions[name])
        assert any(in_order(path) for path in itertools.product(*places)), re.findall(r"\*\*`(\w+)`\*\*", stretch)


def in_order(path):
    return all(CORE_FILES.index(file) <= CORE_FILES.index(next_file) and (file != next_file or line < next_line)
               for (file, line), (next_file, next_line) in itertools.pairwise(path))


def test_the_picture_of_the_five_states_is_that_of_the_code():
    picture = next(code for language, code in FENCE.findall(parts_of(STAGES[2])["The picture"]) if language == "text")
    assert is_in(textwrap.dedent(picture), core_of(STAGES[2])["buffer.py"])


@each_chapter
def test_a_chapter_holds_no_generated_table(chapter):
    assert "<!--" not in text_of(chapter)
    assert "(../results/README.md)" in text_of(chapter)


@each_chapter
def test_a_chapter_sends_its_reader_to_the_reference_once(chapter):
    assert text_of(chapter).count("(../docs/reference.md)") == 1


# What a chapter asks its reader to break: part of the test's name -> before, after, and what the page promises to show.
# Left out is the bug that is a race (stage 4, the wrong bucket): it isn't seen in every run.
DIFFERS = r"parameter \S+ differs by \S+ from replicated training"
BUGS = {
    ("replicated", STAGES[0]): ("                copy_all(shard, cut_like(flat, shard))\n", "", DIFFERS),
    ("replicated", STAGES[1]): (
        "mine = self.shards[self.rank]\n",
        'mine = [param for group in self.optimizer.param_groups for param in group["params"]]\n', DIFFERS),
    ("replicated", STAGES[2]): ("def zero_grad(", "def unused(", DIFFERS),
    ("five_things", STAGES[2]): ("        self.zero_grad()\n", "", r"'PARAMS'\] == "),
    ("leave_in_order", STAGES[3]): (
        "        self.bucket_of[param].ready.add(param)\n        self.send_full_buckets()\n",
        "        bucket = self.bucket_of[param]\n        bucket.ready.add(param)\n"
        "        if bucket.is_full():\n            self.send_grads(bucket)\n",
        r"assert left == list\(range\(6\)\)"),
}


@pytest.mark.waits
@pytest.mark.parametrize("tests, chapter", BUGS, ids=lambda part: part)
def test_the_bug_of_a_chapter_is_seen_by_the_command_beside_it(tests, chapter, tmp_path):
    """In a copy of the repository. Without the edit the same tests are green: tests/stages/test_cores.py has them."""
    before, after, shown = BUGS[tests, chapter]
    for name in ("harness", "guard", "variants", "tests", *STAGES):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    core = tmp_path / chapter / "optimizer.py"
    source = core.read_text(encoding="utf-8")
    assert source.count(before) == 1
    core.write_text(source.replace(before, after), encoding="utf-8")

    (arguments,) = re.findall(rf'make test ARGS="(.*{tests}.*)"', parts_of(chapter)["The bug that you will write"])
    ranks = [] if "--ranks" in arguments else ["--ranks", "2"]  # fewer than the reader's, for the sake of time
    run = run_module("pytest", "-p", "no:cacheprovider", "-x", *shlex.split(arguments), *ranks, cwd=tmp_path)
    assert run.code == 1, run.stdout + run.stderr
    assert re.search(shown, run.stdout), run.stdout
