"""Every Python sample of the guide and of the page on checkpoints runs as it stands there, beside copies of the stages.

A sample whose first line is a comment with a file name is written to that file, for the others to import. Others are
programs: they run on two ranks, or as many as `--nproc-per-node` in their first line says.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.common import STAGES
from tests.ranks import ROOT, run_ranks

PAGES = [ROOT / "docs" / name for name in ("guide.md", "checkpoints.md")]


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


@pytest.mark.waits
@pytest.mark.parametrize("code", [code for *_, code in PROGRAMS], ids=ids(PROGRAMS))
def test_a_sample_runs(folder, code):
    for ended in run(folder, code):
        assert ended.code == 0, ended.stderr


@pytest.mark.waits
def test_a_rank_that_is_lost_ends_the_other_with_one_line(folder):
    (code,) = [code for _, _, code in PROGRAMS if "--fail" in code]
    other, lost = run(folder, code, "--fail")
    assert (other.code, lost.code) == (1, 3)
    assert re.fullmatch(r"rank 0: .+\n", other.stderr), other.stderr


# ------------------------- README.md's in 60 seconds, chapter 3's rung between: DDP's result to the bit


def block_of(page, opening):
    """-> the block of Python of a page that begins so."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(opening)]
    return found


def batches_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(5)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class Loss(nn.Module):
    """What the page writes as `model(batch)`."""

    def __init__(self):
        super().__init__()
        self.model = make_model()

    def forward(self, batch):
        return self.model(batch).pow(2).sum()


def replicated(rank, make_optimizer):
    model = Loss()
    forward, optimizer = DistributedDataParallel(model), make_optimizer(model.parameters())
    for batch in batches_of(rank.rank):
        forward(batch).backward()
        optimizer.step()
        forward.zero_grad()
    return model


def in_60_seconds(rank):
    model = Loss()
    names = {"torch": torch, "dist": dist, "model": model, "rank": rank.rank, "d": rank.world_size,
             "batches": batches_of(rank.rank)}
    exec(block_of("README.md", "model = "), names)
    assert len(names["optimizer"].state) == 2  # of four parameters
    pairs = zip(model.parameters(), replicated(rank, torch.optim.AdamW).parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("world_size", [2])
def test_the_idea_in_60_seconds_is_ddp_to_the_bit(run, world_size):
    assert all(run(in_60_seconds))


def rung_between(rank):
    names, model = {"torch": torch, "dist": dist}, Loss()
    exec(block_of(f"{STAGES[2]}/README.md", "# not in the core"), names)
    for batch in batches_of(rank.rank):
        model(batch).backward()
        names["step"](list(model.parameters()), 0.1, rank.rank, rank.world_size)
        model.zero_grad()
    pairs = zip(model.parameters(), replicated(rank, lambda params: torch.optim.SGD(params, lr=0.1)).parameters(),
                strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("world_size", [2])
def test_the_rung_between_2_and_3_is_ddp_to_the_bit(run, world_size):
    assert all(run(rung_between))
