"""Grades exercise 0: a learner writes reduce_scatter and all_gather as a ring, from sends and receives.

Each rank calls both functions with a few values. `works` checks what the functions return, and `sends` which messages
a rank has sent. The ledger of a rank records the messages: it is a list of entries, with a kind and bytes each.

In both checks, grader.run(d, call) calls call(candidate) on each of d ranks, and returns the list of results. And
require(is_right, expected, came, cause) raises the verdict with these three texts unless `is_right`.
"""

import sys
from typing import NamedTuple

import torch

from grade.grader import require
from grade.levels import Check

N = 8  # elements of a part: on d ranks a whole has d parts
HINT = "the table of chapter 3: in turn k rank r sends part r - 1 - k, and adds its own to part r - 2 - k"


class Call(NamedTuple):
    """Says what one call of a learner's function has done on one rank."""
    expected: torch.Tensor  # what the function should return
    returned: torch.Tensor  # what it has returned
    sent: list  # (kind, bytes) of each message that the rank has sent during the call


def call(candidate):
    """Call reduce_scatter and all_gather on a rank. Return {name of the function: Call}.

    candidate: has the rank's number, its ledger's entries, and the name of the learner's package. The arguments: on
    rank r, part p for reduce_scatter holds 10^r · (p + 1), and the part for all_gather holds r + 1.
    """
    d = torch.distributed.get_world_size()
    parts = torch.arange(1.0, d + 1)[:, None].expand(d, N).contiguous()  # (d, N): each element of part p is p + 1
    arguments = {"reduce_scatter": 10.0**candidate.rank * parts, "all_gather": parts[candidate.rank].clone()}
    right = {"reduce_scatter": parts[candidate.rank] * sum(10.0**rank for rank in range(d)), "all_gather": parts}
    calls = {}
    for name, argument in arguments.items():
        n_before = len(candidate.entries)  # the ledger appends an entry for each message of the call below
        learners_function = getattr(sys.modules[candidate.package], name)
        returned = learners_function(argument).clone()
        sent = [(entry.kind, entry.size) for entry in candidate.entries[n_before:] if entry.kind != "recv"]
        calls[name] = Call(right[name], returned, sent)
    return calls


def works(grader, d):
    """Check the tensors that both functions return on d ranks."""
    for rank, calls in enumerate(grader.run(d, call, cause_of_error=HINT)):
        for name, (expected, returned, _) in calls.items():
            require(returned.shape == expected.shape and torch.equal(returned, expected),
                    f"{name} gives rank {rank} {tuple(expected.shape)}: {firsts(expected)}",
                    f"{tuple(returned.shape)}: {firsts(returned)}", HINT)


def firsts(values):
    """Return the first element of each row, as text."""
    return ", ".join(f"{value:g}" for value in values.reshape(-1, values.shape[-1])[:, 0].tolist())


def sends(grader):
    """Check that rank 0 of 4 sends (d-1)/d of the whole in d - 1 messages, in both functions. Return lines to print."""
    d = 4
    n_bytes = 4 * N  # of a part, whose elements take 4 bytes
    lines = []
    calls_of_rank_0 = grader.run(d, call, cause_of_error=HINT)[0]
    for name, learners_call in calls_of_rank_0.items():
        sent = learners_call.sent
        share = f"{sum(size for _, size in sent)} of {n_bytes * d}"
        kinds = ", ".join(sorted({kind for kind, _ in sent}))
        require(sent == [("send", n_bytes)] * (d - 1), f"{name} sends {d - 1} parts of {n_bytes} bytes on {d} ranks",
                f"{share}, in {len(sent)} messages of {kinds}", "send one part in each turn, and nothing else")
        lines.append(f"{name:14} {share} bytes: (d-1)/d, d = {d}")
    return lines


LEVEL = "Exercise 0: A ring", [  # (title, Checks). A Check has a name, a function, and settings of the function
    *[Check(f"both by hand, {d} ranks", works, d=d) for d in (2, 3, 4)], Check("what a rank sends", sends)]
