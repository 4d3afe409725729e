"""Grades exercise 0, a ring of sends and receives, by few values and by the bytes that the ledger counts."""

import sys
from typing import NamedTuple

import torch

from grade.grader import require
from grade.levels import Check

N = 8  # elements of a part
HINT = "the table of chapter 3: in turn k rank r sends part r - 1 - k, and adds its own to part r - 2 - k"


class Call(NamedTuple):
    """Says what a call of a learner's function has done on a rank."""
    due: torch.Tensor  # what it should return
    came: torch.Tensor
    sent: list  # (kind, bytes) of each message that the rank has sent


def call(candidate):
    """Call both functions; return {name: Call}. On rank r part p holds 10^r · (p + 1), and a part to gather r + 1."""
    d = torch.distributed.get_world_size()
    parts = torch.arange(1.0, d + 1)[:, None].expand(d, N).contiguous()
    arguments = {"reduce_scatter": 10.0**candidate.rank * parts, "all_gather": parts[candidate.rank].clone()}
    dues = {"reduce_scatter": parts[candidate.rank] * sum(10.0**rank for rank in range(d)), "all_gather": parts}
    calls = {}
    for name, argument in arguments.items():
        n_before = len(candidate.entries)
        came = getattr(sys.modules[candidate.package], name)(argument).clone()
        sent = [(entry.kind, entry.size) for entry in candidate.entries[n_before:] if entry.kind != "recv"]
        calls[name] = Call(dues[name], came, sent)
    return calls


def works(grader, d):
    """Check the tensors that both functions return on d ranks."""
    for rank, calls in enumerate(grader.run(d, call, cause_of_error=HINT)):
        for name, (due, came, _) in calls.items():
            require(came.shape == due.shape and torch.equal(came, due),
                    f"{name} gives rank {rank} {tuple(due.shape)}: {firsts(due)}",
                    f"{tuple(came.shape)}: {firsts(came)}", HINT)


def firsts(values):
    """Return the first element of each row, as text."""
    return ", ".join(f"{value:g}" for value in values.reshape(-1, values.shape[-1])[:, 0].tolist())


def sends(grader):
    """Check that both functions send (d-1)/d of the whole, in d - 1 messages, on 4 ranks."""
    d = 4
    n_bytes = 4 * N  # of a part
    lines = []
    for name, (_, _, sent) in grader.run(d, call, cause_of_error=HINT)[0].items():
        share = f"{sum(size for _, size in sent)} of {n_bytes * d}"
        kinds = ", ".join(sorted({kind for kind, _ in sent}))
        require(sent == [("send", n_bytes)] * (d - 1), f"{name} sends {d - 1} parts of {n_bytes} bytes on {d} ranks",
                f"{share}, in {len(sent)} messages of {kinds}", "send one part in each turn, and nothing else")
        lines.append(f"{name:14} {share} bytes: (d-1)/d, d = {d}")
    return lines


LEVEL = "Exercise 0: A ring", [  # title, checks
    *[Check(f"both by hand, {d} ranks", works, d=d) for d in (2, 3, 4)], Check("what a rank sends", sends)]
