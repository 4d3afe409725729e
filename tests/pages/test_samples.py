"""Every Python sample of the guide and of the page on checkpoints runs as it stands there, beside copies of the stages.

A sample whose first line is a comment with a file name is written to that file, for the others to import. Others are
programs: they run on two ranks, or as many as `--nproc-per-node` in their first line says.
"""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import STAGE_3
from tests.common import STAGES
from tests.pages import PAGES, Page
from tests.ranks import ROOT, run_ranks


def samples(page):
    """-> (page, the heading above it, code) of each sample."""
    heading, parts = page, r"^#+ ([^\n]*)$|^```python\n(.*?)^```$"
    for title, code in re.findall(parts, Page(f"docs/{page}.md").text, re.MULTILINE | re.DOTALL):
        heading = title or heading
        if code:
            yield page, heading, code


def file_name(code):
    named = re.match(r"# (\w+\.py)$", code, re.MULTILINE)
    return named and named[1]


ALL = [sample for page in ("guide", "checkpoints", "experts", "same_bits") for sample in samples(page)]
FILES = {file_name(code): code for _, _, code in ALL if file_name(code)}
PROGRAMS = [sample for sample in ALL if not file_name(sample[-1])]


def fill(folder):
    """Make `folder` a reader's: stages, guard/, checkpoint/ and variants/ are beside the program; the rest isn't."""
    for name in [*STAGES, "guard", "checkpoint", "variants"]:
        (folder / name).symlink_to(ROOT / name)
    for name, code in FILES.items():
        (folder / name).write_text(code)


@pytest.fixture
def folder(tmp_path):
    fill(tmp_path)
    return tmp_path


def run_in(folder, code, *args):
    (folder / "program.py").write_text(code)
    asked = re.search(r"--nproc-per-node (\d+)", code.splitlines()[0])
    return run_ranks(int(asked[1]) if asked else 2, folder / "program.py", *args, cwd=folder)


@pytest.mark.waits
@pytest.mark.parametrize("page, heading, code", PROGRAMS, ids=[f"{page}-{heading}" for page, heading, _ in PROGRAMS])
def test_a_sample_runs(folder, page, heading, code):
    """Every rank ends without an error; that of the same bits prints the same on every rank."""
    ranks = run_in(folder, code)
    assert [ended.stderr for ended in ranks if ended.code] == []
    assert page != "same_bits" or len({ended.stdout for ended in ranks}) == 1


@pytest.mark.waits
def test_a_rank_that_is_lost_ends_the_other_with_one_line(folder):
    (code,) = [code for _, _, code in PROGRAMS if "--fail" in code]
    other, lost = run_in(folder, code, "--fail")
    assert (other.code, lost.code) == (1, 3)
    assert re.fullmatch(r"rank 0: .+\n", other.stderr), other.stderr


# --------------- README.md's two loops, chapter 3's rung between: DDP's result to the bit; the class of variants/


def names_of(page, opening, **names):
    """-> the names that the block of Python which begins so leaves, run with these."""
    (code,) = [code for code in Page(page).code() if code.startswith(opening)]
    names |= {"torch": torch, "dist": dist}
    exec(code.replace("torch.distributed.init_process_group()\n", ""), names)  # there is one already
    return names


def batches_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(5)]


class Loss(nn.Module):
    """What the page writes as `model(batch)`. The same on all ranks; its gradients' norm is below 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, batch):
        return self.model(batch).pow(2).mean()


def is_replicated(rank, model, make_optimizer):
    """Whether DDP with that optimizer trains another model to the same bits."""
    other = Loss()
    forward, optimizer = DistributedDataParallel(other), make_optimizer(other.parameters())
    for batch in batches_of(rank.number):
        forward(batch).backward()
        optimizer.step()
        forward.zero_grad()
    return all(torch.equal(one, its) for one, its in zip(model.parameters(), other.parameters(), strict=True))


def in_60_seconds(rank):
    model = Loss()
    names = names_of("README.md", "rank, d = ", model=model, batches=batches_of(rank.number))
    return len(names["optimizer"].state) == 2 and is_replicated(rank, model, torch.optim.AdamW)  # of four parameters


def stage_4(rank):
    model = Loss()
    names = names_of("README.md", "import torch\n", model=model, batches=batches_of(rank.number))
    names["optimizer"].finish_param_sync()
    return is_replicated(rank, model, functools.partial(torch.optim.AdamW, lr=3e-4, fused=True))


def rung_between(rank):
    names, model = names_of(f"{STAGE_3}/README.md", "# not in the core"), Loss()
    for batch in batches_of(rank.number):
        model(batch).backward()
        names["step"](list(model.parameters()), 0.1, rank.number, rank.world_size)
        model.zero_grad()
    return is_replicated(rank, model, lambda params: torch.optim.SGD(params, lr=0.1))


def buffers_of_rank_0(rank):
    """Return whether the guide's function gives every rank the buffers that DDP's rank 0 has, which others hadn't."""
    (function,) = re.findall(r"^def broadcast_buffers.*\n(?: .*\n)+", Page("docs/guide.md").text, re.MULTILINE)
    exec(function, names := {"torch": torch})
    model = nn.BatchNorm1d(6)
    forward = DistributedDataParallel(nn.BatchNorm1d(6))
    for batch in batches_of(rank.number):
        model(batch).sum().backward()
        forward(batch).sum().backward()
    own = model.running_mean.clone()
    names["broadcast_buffers"](model)
    expected = forward.module.running_mean
    dist.broadcast(expected, src=0)
    return torch.equal(model.running_mean, expected) and torch.equal(own, expected) == (rank.number == 0)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("trained", [in_60_seconds, stage_4, rung_between, buffers_of_rank_0])
def test_what_a_page_writes_in_a_few_lines_is_ddp_to_the_bit(run, world_size, trained):
    assert all(run(trained))


def test_the_class_that_puts_a_guard_in_front_of_a_variant_is_one():
    assert issubclass(names_of("variants/README.md", "import stage4_overlap")["Mine"], torch.optim.Optimizer)


def test_no_other_page_has_python_that_nobody_runs():
    """Chapters show code of a core, see test_chapters; tests/grade fills in what is in exercise.md; questions.md and
    migrate.md have tests of their own."""
    others = {"README.md", "docs/exercise.md", "docs/migrate.md", "docs/questions.md", "variants/README.md",
              *(f"docs/{page}.md" for page, *_ in ALL)}
    assert {page.name for page in PAGES if page.code()} == others | {f"{stage}/README.md" for stage in STAGES}
