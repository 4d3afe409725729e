"""What is kept of make faults."""

from dataclasses import dataclass, field


@dataclass
class FaultRow:
    """What was done to a run, how often, what was seen, and whether its end was that of an undisturbed run."""
    fault: str
    times: int
    seen: str
    end: str = "equal"


@dataclass
class Scenarios:
    rows: list[FaultRow]
    stage: int
    ranks: int
    torch: str
    date: str


@dataclass
class Stop:
    """Of a run that moves on: after which step, where it was trained until there, its loss, and DDP's."""
    step: int
    where: str
    loss: float
    undisturbed: float


@dataclass
class FaultResult:
    """The loop of random kills; with what else was done to runs, and the run that moved on."""
    kills: int
    while_saving: int
    steps: int
    tensors: int
    stage: int
    ranks: int
    save_every: int
    seed: int
    torch: str
    date: str
    scenarios: Scenarios | None = None
    journey: list[Stop] = field(default_factory=list)


@dataclass
class MutationRow:
    """Checkpoints changed in one way: how many were refused, were loaded and then stepped and saved, or went wrong."""
    kind: str
    refused: int
    loaded: int
    wrong: int


@dataclass
class MutationResult:
    number: int
    seed: int
    torch: str
    date: str
    rows: list[MutationRow]
