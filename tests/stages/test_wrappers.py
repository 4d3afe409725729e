"""What others wrap: the optimizer, as Lightning and Fabric do, or the model, as DDP does.

A wrapper of the optimizer is an instance of a subclass that is made at run time, and has an `optimizer` of its own: the
one that it wraps. tests/frameworks/ has the real ones.
"""

import re

from torch.nn.parallel import DistributedDataParallel

import checkpoint
from harness.measuring.ledger import Ledger
from tests.common import STAGES, batch, loss_of, on_its_device, on_ranks, trainable
from tests.pairs import Pair
from tests.ranks import ROOT
from tests.stages.test_drawn import drawn


class Delegating:
    """Does what Lightning's and Fabric's wrappers do: the wrapped optimizer has all that the wrapper is asked for."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (Delegating, type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


@on_ranks(2)
def test_a_wrapper_trains_like_the_optimizer_itself(rank, stage):
    drawn(rank, stage, range(6), Delegating)


@on_ranks(2)
def test_a_wrapper_has_the_state_of_the_optimizer(rank, stage):
    """Save, clear and load the state by way of the wrapper: the next step is that of one process."""
    pair = Pair(rank, stage)
    optimizer = pair.optimizer
    pair.optimizer = Delegating(optimizer)
    assert isinstance(pair.optimizer, type(optimizer))
    pair.train(0)
    saved = checkpoint.full_state_dict(pair.optimizer, to_all=True)
    pair.optimizer.state = {}
    assert len(optimizer.state) == len(pair.optimizer.state) == 0
    checkpoint.load_full_state_dict(pair.optimizer, saved)
    pair.train(1)
    pair.assert_same()


# --------------------------------------------------------------------------------------------- DDP around the model


RUNGS = {"replicated": "harness.training.baselines",
         **{f"stage {number}": stage for number, stage in enumerate(STAGES, 1)}}
SITUATIONS = {  # column of the table -> (whether DDP is around the model, arguments of the optimizer)
    "alone": (False, {}),
    "beneath DDP, `average_gradients=False`": (True, {"average_gradients": False}),
    "beneath DDP without that": (True, {}),
}


@on_its_device
def outcome(rank, package, is_beneath_ddp, own_arguments):
    """Train three steps. Return "equal" if parameters are those of one process, or the error of this rank.

    If gradients are averaged by DDP and by the optimizer, the text is "equal, averaged twice".
    """
    try:
        pair = Pair(rank, package, own=own_arguments, lr=0.01)
        forward = pair.model
        if is_beneath_ddp:
            forward = DistributedDataParallel(pair.model, gradient_as_bucket_view=True)
        for step in range(3):
            with Ledger() as ledger:
                loss_of(forward, *batch(step, rank.number)).backward()
                pair.replicated.backward(step)
                pair.clip(1e6)  # has the norm of the averages
                pair.step()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    pair.assert_same()
    reduced = sum(entry.size for entry in ledger.entries if entry.kind in ("all_reduce", "reduce_scatter", "send"))
    of_gradients = sum(param.nbytes for param in trainable(pair.model))
    return "equal, averaged twice" if reduced > 1.9 * of_gradients else "equal"


@on_ranks(2)
def test_the_table_of_ddp_around_the_model_says_what_is_so(rank):
    """All cells of the table in docs/reference.md. An error is in backticks: its first words, with … for a name."""
    page = (ROOT / "docs" / "reference.md").read_text()
    section = page.split("### DDP around the model\n")[1].split("\n##")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    columns = header[1:]
    assert set(columns) == set(SITUATIONS) and {row[0] for row in rows} == set(RUNGS)
    for rung, *cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            expected = re.escape(cell.strip("`")).replace("…", ".+")
            if not cell.startswith("`"):
                expected += "$"
            came = outcome(rank, RUNGS[rung], *SITUATIONS[column])
            assert re.match(expected, came), f"{rung}, {column}: {came}"
