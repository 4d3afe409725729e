"""Which optimizer runs beneath DDP and which without: the table of docs/reference.md; and rung 0 to 4 is one line."""

import json
import re

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness.ledger import Ledger
from tests.common import STAGES, Net, batch, loss_of, on_its_device, on_ranks, optimizer_of, trainable
from tests.pages import test_samples
from tests.pages.test_samples import folder  # noqa: F401
from tests.pairs import Replicated
from tests.ranks import ROOT

RUNGS = {"rung 0": "harness.reference", **{f"stage {number}": stage for number, stage in enumerate(STAGES, 1)}}
SITUATIONS = {  # column of the table -> (whether DDP is around the model, what the optimizer is told)
    "alone": (False, {}),
    "beneath DDP, `average_gradients=False`": (True, {"average_gradients": False}),
    "beneath DDP without that": (True, {}),
}


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


@on_ranks(2)
def test_the_table_says_what_is_so(rank):
    """All of its cells, and no others. An error stands there in backticks: its first words, with … for a name."""
    section = (ROOT / "docs" / "reference.md").read_text().split("### DDP around the model\n")[1].split("\n##")[0]
    (_, *columns), _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()
                               if line.startswith("|")]
    assert set(columns) == set(SITUATIONS) and {row[0] for row in rows} == set(RUNGS)
    for rung, *cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            found = outcome(rank, RUNGS[rung], *SITUATIONS[column])
            expected = re.escape(cell.strip("`")).replace("…", ".+") + ("" if cell.startswith("`") else "$")
            assert re.match(expected, found), f"{rung}, {column}: {found}"


TOLD = "print(torch.cat([param.detach().view(-1) for param in model.parameters()]).tolist())\n"


@pytest.mark.waits  # for a process a rank
def test_from_rung_0_to_stage_4_is_one_line(folder):  # noqa: F811
    """The loop of the guide, with either import: the same weights on both ranks."""
    (folder / "harness").symlink_to(ROOT / "harness")
    (stage_4,) = [code for _, heading, code in test_samples.PROGRAMS if heading == "Train, with a scheduler"]
    rung_0 = stage_4.replace("from stage4_overlap import", "from harness.reference import")
    pairs = zip(stage_4.splitlines(), rung_0.splitlines(), strict=True)
    assert sum(one != other for one, other in pairs) == 1
    ended = [one for code in (stage_4, rung_0)
             for one in test_samples.run_in(folder, code.replace("disconnect()\n", f"{TOLD}disconnect()\n"))]
    assert all(one.code == 0 for one in ended), ended
    weights = [json.loads(one.stdout) for one in ended]
    assert len(weights[0]) == 676 and all(one == weights[0] for one in weights)
