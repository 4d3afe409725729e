"""Grades exercise 0, a ring of sends and receives, by few values and by the bytes that the ledger counts."""

import sys

import torch

from grade.grader import require
from grade.levels import Check

N = 8  # elements of a part
HINT = "the table of chapter 3: in turn k rank r sends part r - 1 - k, and adds its own to part r - 2 - k"


def call(candidate):
    """Return {name of a function: (the tensor that it returns, [(kind, bytes) of each message that it sends])}.

    On rank r all elements of part p are 10^r · (p + 1) before a reduce-scatter, and r + 1 before an all-gather.
    """
    module = sys.modules[candidate.package]
    rank = candidate.rank
    d = torch.distributed.get_world_size()
    parts = (10.0**rank * torch.arange(1.0, d + 1))[:, None].expand(d, N).contiguous()
    results = {}
    for name, argument in ("reduce_scatter", parts.clone()), ("all_gather", torch.full((N,), rank + 1.0)):
        n_before = len(candidate.entries)
        tensor = getattr(module, name)(argument)
        sent = [(entry.kind, entry.size) for entry in candidate.entries[n_before:] if entry.kind != "recv"]
        results[name] = tensor.clone(), sent
    return results


def works(grader, d):
    """Check the tensors that both functions return on d ranks."""
    for rank, results in enumerate(grader.run(d, call, cause_of_error=HINT)):
        expected = {"reduce_scatter": torch.full((N,), (rank + 1) * sum(10.0**r for r in range(d))),
                    "all_gather": torch.arange(1.0, d + 1)[:, None].expand(d, N)}
        for name, (came, _) in results.items():
            due = expected[name]
            require(came.shape == due.shape and torch.equal(came, due),
                    f"{name} gives rank {rank} {tuple(due.shape)}: {firsts(due)}",
                    f"{tuple(came.shape)}: {firsts(came)}", HINT)


def firsts(values):
    """Return the first element of each row, as text."""
    return ", ".join(f"{value:g}" for value in values.reshape(-1, values.shape[-1])[:, 0].tolist())


def sends(grader):
    """Check that both functions send (d-1)/d of the whole, in d - 1 messages, on 4 ranks."""
    d = 4
    lines = []
    for name, (_, sent) in grader.run(d, call, cause_of_error=HINT)[0].items():
        share = f"{sum(size for _, size in sent)} of {4 * N * d}"
        require(sent == [("send", 4 * N)] * (d - 1), f"{name} sends {d - 1} parts of {4 * N} bytes on {d} ranks",
                f"{share}, in {len(sent)} messages of {', '.join(sorted({kind for kind, _ in sent}))}",
                "send one part in each turn, and nothing else")
        lines.append(f"{name:14} {share} bytes: (d-1)/d, d = {d}")
    return lines


LEVEL = "Exercise 0: A ring", [
    *(Check(f"both by hand, {d} ranks", works, d=d) for d in (2, 3, 4)), Check("what a rank sends", sends)]
