"""Grades exercise 0, a ring of sends and receives: by hand values, and by the bytes that the ledger counts.

    make exercise STAGE=0 TO=mine; make grade STAGE=mine.ring
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from grade.grader import first_wrong
from grade.levels import Check
from harness.take import code_lines

N, MOST_LINES = 8, 25  # elements of a part; code lines of both functions
HINT = "the table of chapter 3: in turn k rank r sends part r - 1 - k, and adds its own to part r - 2 - k"


def call(candidate):
    """-> what both functions make of values by hand, and what they send. Rank r's part p is 10^r · (p + 1)."""
    module, entries, rank = sys.modules[candidate.package], candidate.entries, candidate.rank
    d = torch.distributed.get_world_size()
    parts = (10.0**rank * torch.arange(1.0, d + 1))[:, None].expand(d, N).contiguous()
    before = len(entries)
    summed = module.reduce_scatter(parts.clone())
    between = len(entries)
    gathered = module.all_gather(torch.full((N,), rank + 1.0))
    kinds = [[(entry.kind, entry.size) for entry in part if entry.kind != "recv"]
             for part in (entries[before:between], entries[between:])]
    return SimpleNamespace(summed=summed.clone(), gathered=gathered.clone(), sent=kinds)


def works(d):
    """-> a check of both results on d ranks."""
    def check(grader):
        for rank, seen in enumerate(grader.run(d, call, hint=HINT)):
            for name, came, due in (
                    ("reduce_scatter", seen.summed, torch.full((N,), (rank + 1) * sum(10.0**r for r in range(d)))),
                    ("all_gather", seen.gathered, torch.arange(1.0, d + 1)[:, None].expand(d, N))):
                is_right = came.shape == due.shape and torch.equal(came, due)
                first_wrong([(not is_right, f"{name} gives rank {rank} {tuple(due.shape)}: {as_text(due)}",
                              f"{tuple(came.shape)}: {as_text(came)}", HINT)])
    return check


def as_text(values):
    """-> the first element of each row."""
    return ", ".join(f"{value:g}" for value in values.reshape(-1, values.shape[-1])[:, 0].tolist())


def sends(grader):
    """Check that each of both sends (d-1)/d of the whole, on 4 ranks, in d - 1 messages."""
    d, lines = 4, []
    for name, sent in zip(("reduce_scatter", "all_gather"), grader.run(d, call, hint=HINT)[0].sent):
        n_bytes, whole = sum(size for _, size in sent), 4 * N * d
        came = f"{n_bytes} of {whole}, in {len(sent)} messages of {', '.join(sorted({kind for kind, _ in sent}))}"
        first_wrong([(sent != [("send", 4 * N)] * (d - 1), f"{name} sends {d - 1} parts of {4 * N} bytes on {d} ranks",
                      came, "a part for each turn and no more: all the rest is on its way already")])
        lines.append(f"{name:14} {n_bytes} of {whole} bytes: (d-1)/d, d = {d}")
    return lines


def is_short(grader):
    n_lines = len(code_lines(Path(grader.facts.file)))
    first_wrong([(n_lines > MOST_LINES, f"at most {MOST_LINES} code lines, with `exchange`", str(n_lines),
                  "a loop of d - 1 turns, in each an exchange")])
    return [f"lines      {n_lines}"]


CHECKS = [Check(f"both by hand, {d} ranks", works(d)) for d in (2, 3, 4)]
LEVEL = "Exercise 0: A ring", [*CHECKS, Check("what a rank sends", sends), Check("its code lines", is_short)]
