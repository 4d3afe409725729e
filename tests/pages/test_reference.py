"""docs/reference.md is found by searching for an error: so its error texts are those of the code, and none is missing.

An error of ours stands alone on a line, in backticks, with `…` for what varies; one of torch begins with "torch:".
"""

import ast
import functools
import re

import pytest

from checkpoint import errors
from tests.common import STAGES
from tests.ranks import ROOT

PAGE = ROOT / "docs" / "reference.md"
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


SHOWN = [one or two for one, two in re.findall(r"^(?:`([^`]+)`|`` ?(.+?) ?``)$", PAGE.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("shown", SHOWN)
def test_an_error_that_is_shown_is_one_of_the_code(shown):
    code = [text for path in SOURCES for text in texts(path)]
    for fragment in fragments(shown):
        assert any(fragment in text for text in code), f"nothing in the code says {fragment!r}"


@pytest.mark.parametrize("path", RAISED, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_error_that_is_raised_is_shown(path):
    if path.name not in PROGRAMS:
        for text in texts(path, errors_only=True):
            longest = max(fragments(text), key=len, default="")
            if " " in longest:  # else it only puts others together
                assert longest in " ".join(PAGE.read_text().split()), f"docs/reference.md has no heading for {text!r}"


def test_every_group_is_in_the_contents():
    page = PAGE.read_text()
    groups = re.findall(r"^## (.+)$", page, flags=re.MULTILINE)
    assert re.findall(r"^- \[(.+?)\]\(#", page, flags=re.MULTILINE) == groups
