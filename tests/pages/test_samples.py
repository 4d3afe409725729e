"""Every Python sample of the guide and of the page on checkpoints runs as it stands there, beside copies of the stages.

A sample whose first line is a comment with a file name is written to that file, for the others to import. Others are
programs: they run on two ranks, or as many as `--nproc-per-node` in their first line says.
"""

import functools
import re
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import STAGE_3
from tests.common import STAGES
from tests.pages import PAGES, Page
from tests.ranks import ROOT, run_ranks


class Sample(NamedTuple):
    page: str
    heading: str  # the one above
    code: str

    def file(self):
        """Return the name of the file that the first line names, or ""."""
        return "".join(re.findall(r"\A# (\w+\.py)$", self.code, re.MULTILINE))


def samples(page):
    """Return the Samples of a page."""
    result = []
    heading = page
    text = Page(f"docs/{page}.md").text
    for title, code in re.findall(r"^#+ ([^\n]*)$|^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        heading = title or heading
        if code:
            result.append(Sample(page, heading, code))
    return result


ALL = [*samples("guide"), *samples("checkpoints"), *samples("experts"), *samples("same_bits")]
FILES = {sample.file(): sample.code for sample in ALL if sample.file()}
PROGRAMS = [sample for sample in ALL if not sample.file()]


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
@pytest.mark.parametrize("sample", PROGRAMS, ids=lambda sample: f"{sample.page}-{sample.heading}")
def test_a_sample_runs(folder, sample):
    """Run a sample: every rank ends without an error. The sample of the same bits prints the same on every rank."""
    ranks = run_in(folder, sample.code)
    assert [ended.stderr for ended in ranks if ended.code] == []
    assert sample.page != "same_bits" or len({ended.stdout for ended in ranks}) == 1


@pytest.mark.waits
def test_a_rank_that_is_lost_ends_the_other_with_one_line(folder):
    (code,) = [sample.code for sample in PROGRAMS if "--fail" in sample.code]
    other, lost = run_in(folder, code, "--fail")
    assert (other.code, lost.code) == (1, 3)
    assert re.fullmatch(r"rank 0: .+\n", other.stderr), other.stderr


# --------------- README.md's two loops, chapter 3's rung between: DDP's result to the bit; the class of variants/


def names_of(page, opening, **names):
    """Run the block of Python that begins so, with these names, and return all names that the block leaves."""
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
    """Whether DDP with an optimizer trains another model to the same bits."""
    ddp = DistributedDataParallel(Loss())
    optimizer = make_optimizer(ddp.parameters())
    for batch in batches_of(rank.number):
        ddp(batch).backward()
        optimizer.step()
        ddp.zero_grad()
    return all(map(torch.equal, model.parameters(), ddp.parameters()))


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
    model = Loss()
    names = names_of(f"{STAGE_3}/README.md", "# not in the core")
    for batch in batches_of(rank.number):
        model(batch).backward()
        names["step"](list(model.parameters()), 0.1, rank.number, rank.world_size)
        model.zero_grad()
    return is_replicated(rank, model, lambda params: torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("trained", [in_60_seconds, stage_4, rung_between])
def test_what_a_page_writes_in_a_few_lines_is_ddp_to_the_bit(run, world_size, trained):
    assert all(run(trained))


def test_the_class_that_puts_a_guard_in_front_of_a_variant_is_one():
    assert issubclass(names_of("variants/README.md", "import stage4_overlap")["Mine"], torch.optim.Optimizer)


def test_no_other_page_has_python_that_nobody_runs():
    """Chapters show code of a core, see test_chapters; tests/grade fills in what is in exercise.md; questions.md and
    migrate.md have tests of their own."""
    others = {"README.md", "docs/exercise.md", "docs/migrate.md", "docs/questions.md", "variants/README.md",
              *(f"docs/{sample.page}.md" for sample in ALL)}
    assert {page.name for page in PAGES if page.code()} == others | {f"{stage}/README.md" for stage in STAGES}
