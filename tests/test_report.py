"""The tables and pictures in README.md and the chapters are those of results/*.json."""

import re

import pytest

from harness import report


@pytest.mark.parametrize("path", report.files(), ids=lambda path: path.parent.name + "/" + path.name)
def test_every_block_agrees_with_its_json(path):
    text = path.read_text()
    assert report.rewritten(text) == text, "run make report"


@pytest.mark.parametrize("path", report.PICTURES, ids=lambda path: path.name)
def test_every_picture_agrees_with_its_json(path):
    assert report.PICTURES[path]() == path.read_text(), "run make report"


def test_there_are_blocks_in_the_readme_and_the_chapter_of_stage_4():
    names = {name for path in report.files() for name in re.findall(r"<!-- report: (\w+) -->", path.read_text())}
    assert names == set(report.BLOCKS)


def test_a_figure_that_somebody_typed_is_found():
    text = (report.ROOT / "README.md").read_text()
    at = text.index("ddp + stage 1")
    assert report.rewritten(text[:at] + text[at:].replace("3 all-reduce", "2 all-reduce", 1)) == text


def test_an_unknown_block_is_an_error():
    with pytest.raises(KeyError):
        report.rewritten("<!-- report: nothing -->\n<!-- end -->\n")
