"""What is kept of make saving."""

import statistics
from dataclasses import dataclass


@dataclass
class SavingConditions:
    """`bytes`: that all ranks together write. `step_ms`: a step without a save, the median of the rounds."""
    machine: str
    torch: str
    ranks: int
    bytes: int
    rounds: int
    step_ms: float
    date: str
    commit: str | None = None


@dataclass
class SavingRow:
    """`beside`: the row whose rate is the disk's for this one; "": it is the disk. Seconds of the slowest rank."""
    name: str
    beside: str
    rounds_s: list[float]

    @property
    def median_s(self):
        return statistics.median(self.rounds_s)


@dataclass
class SavingResult:
    """Of an asynchronous save, by round. `held_up_ms`: how long it holds up the step that calls it. `n_behind`: steps
    that ran while it was written; `behind_ms`: what these took more than as many without."""
    conditions: SavingConditions
    rows: list[SavingRow]
    held_up_ms: list[float]
    behind_ms: list[float]
    n_behind: list[int]

    def row(self, name):
        return next(row for row in self.rows if row.name == name)
