"""Every page says what is there, as far as files tell; and the check finds each mistake in a small project."""

import ast
import functools
import re
import subprocess

import pytest

from checkpoint import errors
from harness import docs_check
from harness.tables import code_lines, core_lines
from tests.common import STAGES
from tests.ranks import ROOT


def test_every_page_says_what_is_there():
    """Links, names, commands, samples, tables that stand twice, and words: see harness/docs_check.py."""
    problems = docs_check.problems()
    assert not problems, "\n".join(problems)
    assert docs_check.MOST_WORDS.keys() <= {page.name for page in docs_check.Project().pages}
    most = {"reference.md": 4950, "exercise.md": 1550, "guide.md": 1255, "frameworks.md": 1230, "checkpoints.md": 695,
            "names.md": 445, "plan.md": 430, "muon.md": 425}
    words = {path.name: len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")}
    assert words.keys() == most.keys() and not [page for page in most if words[page] > most[page]], words


@pytest.fixture
def project(tmp_path):
    """`project(page)` writes page.md of a small project, and returns what is wrong with it."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "Makefile").write_text(
        'STAGE ?= 4\nARGS ?=\ntrain:\n\t$(if $(wildcard stage$(STAGE)_*),,$(error there is no stage $(STAGE)))\n'
        "\techo $(STAGE) $(ARGS)\n")
    (tmp_path / ".gitignore").write_text(".venv/\nruns/\n")
    (tmp_path / "stage4_overlap").mkdir()
    (tmp_path / "stage4_overlap" / "__init__.py").write_text(
        "from .optimizer import DistributedOptimizer as DistributedOptimizer")
    (tmp_path / "stage4_overlap" / "optimizer.py").write_text(
        "def step(self):  # once\n    self.sync_grads()\n    self.step_own()\n    self.sync_params()\n")
    (tmp_path / "stage4_overlap" / "train.py").write_text('add("--steps")')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_contract.py").write_text("def test_clip(): pass")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "other.md").write_text("[dead](nowhere.md)")

    def check(text, name="page.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return docs_check.problems(tmp_path)
    check.root = tmp_path
    return check


RIGHT = """# A page

See [below](#the-step-of-a-stage), [the code](stage4_overlap/optimizer.py#L2), `stage4_overlap/`, `optimizer.py`,
`test_clip`, [`distrib_optimizer.py`](https://example.org/distrib_optimizer.py), `my_package/optimizer.py`, and `make
train STAGE=4`.

## The `step` of a stage

    make train STAGE=4 ARGS="--steps 3"     # a comment
    torchrun --standalone --nproc-per-node 2 stage4_overlap/train.py \\
        --steps 3
    rank 0  A  B  C

```python
from stage4_overlap import DistributedOptimizer
optimizer = DistributedOptimizer(…)
optimizer.sync_grads()
```

    python -m json.tool [--indent 2]

Save a sample as `program.py`, beside this file.

```python
# common.py
def connect(): ...
```

```python
from common import connect
```

    torchrun --nproc-per-node 2 program.py
"""


def test_a_right_page_has_no_problem(project):
    assert project(RIGHT) == []
    commands = [text for _, text in docs_check.Page(project.root / "page.md", project.root).commands()]
    assert commands[0].startswith("make train") and commands[1].endswith("train.py --steps 3") and len(commands) == 5


MISTAKES = [
    ("[text](nowhere.md)", "there is no nowhere.md"),
    ("![picture](nowhere.svg)", "there is no nowhere.svg"),
    ('<img src="nowhere.svg">', "there is no nowhere.svg"),
    ("[text](#nothing)", "there is no such heading"),
    ("[text](stage4_overlap/optimizer.py#L99)", "the file has fewer lines"),
    ("`stage4_overlap/hooks.py`", "there is no such file"),
    ("`guard/`", "there is no such file or folder"),
    ("`hooks.py`", "there is no such file"),
    ("`../hooks.py`", "there is no such file"),
    ("`test_nothing`", "there is no such test"),
    ("`make nothing`", "No rule to make target 'nothing'"),
    ("`make\nnothing`", "No rule to make target 'nothing'"),
    ("`make train STAGE=9`", "there is no stage 9"),
    ("`make train STAEG=4`", "no variable STAEG"),
    ('`make train ARGS="--stpes 3"`', "no program has the option --stpes"),
    ('`make train ARGS="-k nothing"`', "no test is called nothing"),
    ("`make train ARGS=\"--steps 3`", "no shell reads that"),
    ("    torchrun stage4_overlap/nothing.py", "there is no stage4_overlap/nothing.py"),
    ("    python -m stage4_overlap.nothing", "there is no module stage4_overlap.nothing"),
    ("    python -m torch.nothing", "there is no module torch.nothing"),
    ("    python nothing.py", "there is no nothing.py"),
    ("    cp -r stage5_more elsewhere/", "there is no stage5_more"),
    ("```sh\nfrobnicate\n```", "doesn't know 'frobnicate'"),
    ("```python\nif:\n```", "no Python"),
    ("```python\nfrom stage4_overlap import Nothing\n```", "import of Nothing from stage4_overlap"),
    ("```python\nimport stage4_overlap.nothing\n```", "import of stage4_overlap.nothing"),
    ("```python\noptimizer.nothing()\n```", "optimizer.nothing: no stage has that"),
    ("<!-- report: bench -->", "a generated table"),
    ("word " * (docs_check.MOST_WORDS_ELSEWHERE + 1), "words: it may have"),
]


def test_a_mistake_is_named_with_its_line(project):
    for mistake, message in MISTAKES:
        wrong = project(f"Text.\n\n{mistake}\n")
        assert len(wrong) == 1 and message in wrong[0], mistake
        line = 1 if "words" in message or "table" in message else 4 if mistake.startswith("```") else 3
        assert wrong[0].startswith(f"page.md:{line}"), mistake


def test_a_row_of_a_table_stands_in_one_page_only(project):
    table = "\n| | bytes |\n|---|---|\n| stage 4 | 4 + 12/d |\n"
    assert project(table) == []
    (wrong,) = [line for line in project(f"Text.\n{table}", "docs/more.md") if "12/d" in line]
    assert wrong == "page.md:4: 'stage 4 | 4 + 12/d' stands in docs/more.md:5 already"


def test_code_lines_are_no_blanks_comments_or_docstrings(tmp_path):
    (tmp_path / "optimizer.py").write_text(
        '"""Docs,\n\nlong."""\n\nimport torch\n\n# comment\n\nclass A:\n    """Docs."""\n'
        '\n    def f(self):\n        """Docs."""\n        return """a\n\nb"""  # one\n'
    )
    assert list(code_lines(tmp_path / "optimizer.py")) == [5, 9, 12, 14, 15, 16]
    assert core_lines(tmp_path) == 6


# ------------------------------------------------------------------------------------------------- the reference


REFERENCE = ROOT / "docs" / "reference.md"
RAISED = sorted(path for folder in [*STAGES, "guard", "checkpoint"] for path in (ROOT / folder).rglob("*.py"))
SOURCES = [*RAISED, *sorted((ROOT / "harness").rglob("*.py"))]
PROGRAMS = ("train.py", "__main__.py")  # their messages are about options, and name these


def is_error(function):
    """Whether a call of it makes an exception: ValueError(…), pickle.UnpicklingError(…), DamagedCheckpoint(…)."""
    name = getattr(function, "id", getattr(function, "attr", ""))
    return name.endswith("Error") or name in vars(errors)


@functools.cache
def texts(path, errors_only=False):
    """The strings of a file, with … for what is filled in; of module-level constants their values."""
    tree = ast.parse(path.read_text())
    constants = {node.targets[0].id: node.value.value for node in tree.body
                 if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                 and isinstance(node.targets[0], ast.Name)}

    def text_of(node):
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else "…"
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text_of, node.values))
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
            return str(constants.get(node.value.id, "…"))
        return "…"

    roots = [tree]
    if errors_only:
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        roots = [argument for call in calls if is_error(call.func) for argument in call.args]
    strings = [node for root in roots for node in ast.walk(root) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return [text for text in map(text_of, strings) if text.strip("… ")]


def fragments(text):
    return [part.strip(" :;") for part in text.split("…") if part.strip(" :;")]


SHOWN = re.findall(r"^    (?!torch: )(.+)$", REFERENCE.read_text(), re.MULTILINE)


def test_errors_of_the_reference_are_those_of_the_code():
    """The page is found by searching for an error: what it shows is raised, and what is raised it shows.

    An error of ours is a line of a block of code, with `…` for what varies; one of torch begins with "torch:".
    """
    code = [text for path in SOURCES for text in texts(path)]
    assert len(SHOWN) > 100
    for shown in SHOWN:
        for fragment in fragments(shown):
            assert any(fragment in text for text in code), f"nothing in the code says {fragment!r}"
    page = " ".join(REFERENCE.read_text().split())
    for path in [path for path in RAISED if path.name not in PROGRAMS]:
        for text in texts(path, errors_only=True):
            longest = max(fragments(text), key=len, default="")
            # without a space in it, it only puts others together
            assert " " not in longest or longest in page, f"docs/reference.md has no entry for {text!r}"


def test_every_group_of_the_reference_is_in_its_contents():
    page = REFERENCE.read_text()
    groups = re.findall(r"^## (.+)$", page, flags=re.MULTILINE)
    assert re.findall(r"^- \[(.+?)\]\(#", page, flags=re.MULTILINE) == groups
