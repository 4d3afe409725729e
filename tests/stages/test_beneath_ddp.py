"""Which optimizer runs beneath DDP and which without: the table of docs/reference.md; and rung 0 to 4 is one line."""

import json
import re

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness.ledger import Ledger
from tests.common import STAGES, Net, batch, loss_of, on_its_device, optimizer_of, trainable
from tests.pages.test_samples import FILES, PROGRAMS
from tests.pairs import Replicated
from tests.ranks import ROOT, run_ranks

RUNGS = {"rung 0": "harness.reference", **{f"stage {number}": stage for number, stage in enumerate(STAGES, 1)}}
SITUATIONS = {  # column of the table -> (whether DDP is around the model, what the optimizer is told)
    "alone": (False, {}),
    "beneath DDP, `average_gradients=False`": (True, {"average_gradients": False}),
    "beneath DDP without that": (True, {}),
}
HEADING = "### DDP around the model"


@on_its_device
def outcome(rank, package, is_beneath, options):
    """Three steps -> "equal" to replicated training to the bit, with ", averaged twice" if so; or the rank's error."""
    model, reference = Net(seed=rank.rank), Replicated(rank, lr=0.01)
    try:
        optimizer = optimizer_of(package)(trainable(model), lr=0.01, **options)
        forward = DistributedDataParallel(model) if is_beneath else model
        for step in range(3):
            with Ledger() as ledger:
                loss_of(forward, *batch(step, rank.rank)).backward()
                optimizer.step()
            optimizer.zero_grad()
            reference.step(step)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    pairs = zip(model.parameters(), reference.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    reduced = sum(entry.size for entry in ledger.entries if entry.kind in ("all_reduce", "reduce_scatter", "send"))
    return "equal" + ", averaged twice" * (reduced > 1.9 * sum(param.nbytes for param in trainable(model)))


def table():
    """-> {rung: {situation: cell}} of the page."""
    section = (ROOT / "docs" / "reference.md").read_text().split(f"{HEADING}\n")[1].split("\n##")[0]
    (_, *names), _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()
                             if line.startswith("|")]
    return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}


def test_the_table_has_every_case():
    assert {rung: set(cells) for rung, cells in table().items()} == {rung: set(SITUATIONS) for rung in RUNGS}


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("rung", RUNGS)
def test_what_the_table_says_is_so(run, rung, situation):
    """An error stands there in backticks: its first words, with … for a name."""
    cell = table()[rung][situation]
    for found in run(outcome, RUNGS[rung], *SITUATIONS[situation]):
        if cell.startswith("`"):
            assert re.match(re.escape(cell.strip("`")).replace("…", ".+"), found), found
        else:
            assert found == cell


# ---------------------------------------------------------------------------------------------- rung 0 -> stage 4

IMPORT = "from stage4_overlap import DistributedOptimizer\n"
TOLD = "print(torch.cat([param.detach().view(-1) for param in model.parameters()]).tolist())\n"


@pytest.mark.waits  # for a process a rank
def test_from_rung_0_to_stage_4_is_one_line(tmp_path):
    """The loop of the guide, with either import: the same weights on both ranks."""
    for name in (*STAGES, "guard", "harness"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "common.py").write_text(FILES["common.py"])
    (stage_4,) = [code for _, heading, code in PROGRAMS if heading == "Train, with a scheduler"]
    rung_0 = stage_4.replace(IMPORT, "from harness.reference import DistributedOptimizer\n")
    pairs = zip(stage_4.splitlines(), rung_0.splitlines(), strict=True)
    assert sum(one != other for one, other in pairs) == 1
    weights = []
    for code in (stage_4, rung_0):
        (tmp_path / "program.py").write_text(code.replace("disconnect()\n", f"{TOLD}disconnect()\n"))
        for ended in run_ranks(2, tmp_path / "program.py", cwd=tmp_path):
            assert ended.code == 0, ended.stderr
            weights.append(json.loads(ended.stdout))
    assert len(weights[0]) == 676 and all(one == weights[0] for one in weights)
