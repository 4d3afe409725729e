"""What is kept of harness/measure/losses.py."""

from dataclasses import dataclass


@dataclass
class LossConditions:
    machine: str
    torch: str
    backend: str
    ranks: int
    model: str
    parameters: int
    batch_size: int
    sequence_length: int
    steps: int
    date: str
    commit: str | None = None


@dataclass
class LossRow:
    """`losses`: nats a byte of text that was kept for that, after the last step, by seed. `base`: the name of the row
    of the same beta2 that it is compared with."""
    name: str
    base: str
    beta2: float
    losses: list[float]


@dataclass
class LossResult:
    conditions: LossConditions
    rows: list[LossRow]

    def more(self, row):
        """-> by seed, by how much its loss is above its base's."""
        base = next(one for one in self.rows if (one.name, one.beta2) == (row.base, row.beta2))
        return [loss - other for loss, other in zip(row.losses, base.losses)]
