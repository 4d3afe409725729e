"""What others wrap: the optimizer, as Lightning and Fabric do, or the model, as DDP does.

A wrapper of the optimizer is an instance of a subclass that is made at run time, and has an `optimizer` of its own: the
one that it wraps. tests/frameworks/ has the real ones.
"""

import re

import torch
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from harness.measuring.ledger import Ledger
from tests.common import STAGES, batch, loss_of, on_its_device, on_ranks, trainable
from tests.pairs import Pair
from tests.ranks import ROOT
from tests.stages.test_drawn import drawn


class Delegating:
    """lightning.pytorch.core.optimizer: all that is asked for by name is the optimizer's."""

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


class Copying:
    """Fabric's, of earlier versions: attributes are copied."""

    def __init__(self, optimizer):
        self.__dict__ = {key: value for key, value in vars(optimizer).items() if key not in ("state_dict", "step")}
        self.__class__ = type("Wrapped", (Copying, type(optimizer)), {})
        self._optimizer = self.optimizer = optimizer

    def step(self, closure=None):
        return self._optimizer.step(closure)


@on_ranks(2, wrap=[Delegating, Copying])
def test_a_wrapper_trains_like_the_optimizer_itself(rank, stage, wrap):
    drawn(rank, stage, range(6), wrap)


@on_ranks(2, wrap=[Delegating, Copying])
def test_a_wrapper_has_the_state_and_the_settings_of_the_optimizer(rank, stage, wrap):
    """A scheduler, and a state that is read, reset, loaded and assigned."""
    pair = Pair(rank, stage)
    inner, pair.optimizer = pair.optimizer, wrap(pair.optimizer)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in pair.optimizers]
    for step in range(3):
        pair.train(step)
        for scheduler in schedulers:
            scheduler.step()
    checkpoint.load_full_state_dict(pair.optimizer, checkpoint.full_state_dict(inner))
    for one, model in zip(pair.optimizers, pair.models):
        for param in [param for param in trainable(model) if param in one.state]:
            one.state[param]["exp_avg"].zero_()
    pair.train(3)
    pair.assert_same()
    pair.optimizer.state = {}
    assert len(inner.state) == len(pair.optimizer.state) == 0 and isinstance(pair.optimizer, type(inner))


# --------------------------------------------------------------------------------------------- DDP around the model


RUNGS = {"replicated": "harness.training.baselines",
         **{f"stage {number}": stage for number, stage in enumerate(STAGES, 1)}}
SITUATIONS = {  # column of the table -> (whether DDP is around the model, what the optimizer is told)
    "alone": (False, {}),
    "beneath DDP, `average_gradients=False`": (True, {"average_gradients": False}),
    "beneath DDP without that": (True, {}),
}


@on_its_device
def outcome(rank, package, is_beneath, options):
    """Three steps -> "equal" to replicated training to the bit, with ", averaged twice" if so; or the rank's error."""
    try:
        pair = Pair(rank, package, own=options, lr=0.01)
        forward = DistributedDataParallel(pair.model, gradient_as_bucket_view=True) if is_beneath else pair.model
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
    return "equal" + ", averaged twice" * (reduced > 1.9 * sum(param.nbytes for param in trainable(pair.model)))


@on_ranks(2)
def test_the_table_of_ddp_around_the_model_says_what_is_so(rank):
    """All cells of the table in docs/reference.md. An error is in backticks: its first words, with … for a name."""
    section = (ROOT / "docs" / "reference.md").read_text().split("### DDP around the model\n")[1].split("\n##")[0]
    (_, *columns), _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()
                               if line.startswith("|")]
    assert set(columns) == set(SITUATIONS) and {row[0] for row in rows} == set(RUNGS)
    for rung, *cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            found = outcome(rank, RUNGS[rung], *SITUATIONS[column])
            expected = re.escape(cell.strip("`")).replace("…", ".+") + ("" if cell.startswith("`") else "$")
            assert re.match(expected, found), f"{rung}, {column}: {found}"
