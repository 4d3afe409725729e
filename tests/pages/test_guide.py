"""Every Python sample of the guide and of the page on checkpoints runs as it stands there, beside copies of the stages.

A sample whose first line is a comment with a file name is written to that file, for the others to import. Others are
programs: they run on two ranks, or as many as `--nproc-per-node` in their first line says.
"""

import re

import pytest

from tests.common import STAGES
from tests.ranks import ROOT, run_ranks

PAGES = [ROOT / "docs" / name for name in ("guide.md", "checkpoints.md")]
MAX_WORDS = {"guide.md": 1850, "checkpoints.md": 1100}


def samples(page):
    """-> (the heading above it, code) of each sample."""
    heading, found = page.stem, []
    for part in re.split(r"^(#+ [^\n]*|```python\n.*?^```)$", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        if part.startswith("#"):
            heading = part.lstrip("# ")
        elif part.startswith("```python\n"):
            found.append((heading, part.removeprefix("```python\n").removesuffix("```")))
    return found


def file_name(code):
    named = re.match(r"# (\w+\.py)$", code, re.MULTILINE)
    return named and named[1]


ALL = [(page.stem, *sample) for page in PAGES for sample in samples(page)]
FILES = {file_name(code): code for _, _, code in ALL if file_name(code)}
PROGRAMS = [(page, heading, code) for page, heading, code in ALL if not file_name(code)]


@pytest.fixture
def folder(tmp_path):
    """A reader's: stages, guard/, checkpoint/ and variants/ are beside the program; the rest isn't."""
    for name in [*STAGES, "guard", "checkpoint", "variants"]:
        (tmp_path / name).symlink_to(ROOT / name)
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    return tmp_path


def run(folder, code, *args):
    (folder / "program.py").write_text(code)
    asked = re.search(r"--nproc-per-node (\d+)", code.splitlines()[0])
    return run_ranks(int(asked[1]) if asked else 2, folder / "program.py", *args, cwd=folder)


def ids(programs):
    return [f"{page}-{heading}" for page, heading, _ in programs]


def test_each_page_has_samples():
    """Or the tests below would run nothing, and be green."""
    assert all(sum(page == path.stem for page, *_ in PROGRAMS) >= 3 for path in PAGES)
    assert list(FILES) == ["common.py"]


@pytest.mark.parametrize("code", [code for *_, code in PROGRAMS], ids=ids(PROGRAMS))
def test_a_sample_runs(folder, code):
    for ended in run(folder, code):
        assert ended.code == 0, ended.stderr


def test_a_rank_that_is_lost_ends_the_other_with_one_line(folder):
    (code,) = [code for _, _, code in PROGRAMS if "--fail" in code]
    other, lost = run(folder, code, "--fail")
    assert (other.code, lost.code) == (1, 3)
    assert re.fullmatch(r"rank 0: .+\n", other.stderr), other.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page):
    assert len(page.read_text().split()) <= MAX_WORDS[page.name]
