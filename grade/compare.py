"""Compares the parameters and norms of ranks with those of one process that has the batches of all ranks.

Where they differ it raises Wrong, with the known mistake that gives what the ranks have. In the arguments, `ranks` are
the Seen of each rank, and a snapshot (numel,) has all parameters after a step; the first snapshot is of the start.
"""

import torch

from grade.by_hand import ALMOST, NOT_AVERAGED, NOT_RECEIVED
from grade.grader import UNKNOWN, Wrong
from grade.mistakes import each_alone, mistaken_runs


def close(a, b):
    """Compare elements up to rounding, because over three or more ranks the order of a sum depends on the layout."""
    return torch.isclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-4, atol=2e-6)


def difference(came, due, run):
    """Return "2.weight, 2.bias differ by up to 0.12", for two snapshots."""
    differs = ~close(came, due)
    if not differs.any():
        differs = came != due  # in the last bits
    params = dict(run.model(0).named_parameters())
    masks = differs.split([param.numel() for param in params.values()])
    names = [name for name, mask in zip(params, masks) if mask.any()]
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    verb = "differs" if len(names) == 1 else "differ"
    return f"{', '.join(names[:3])}{rest} {verb} by up to {(came - due).abs().max():.2g}"


def check_params(run, ranks, due, index, cause_if_unknown):
    """Compare the snapshots `index` of all ranks with rank 0's, and this with the snapshot of `due`, of one process."""
    when = f"after step {run.steps if run.prefetch else index}"  # with prefetch the last step alone has a snapshot
    first = ranks[0].snapshots[index]
    for rank, seen in enumerate(ranks):
        params = seen.snapshots[index]
        if not torch.equal(params, first):
            raise Wrong("all ranks have the same parameters after every step",
                        f"{when}, {difference(params, first, run)} between rank 0 and rank {rank}",
                        cause_if_unknown or cause_of_unequal(run, ranks, index))
    if not close(first, due[index]).all():
        raise Wrong(f"{len(ranks)} ranks train like one process that has the batches of all",
                    f"{when}, {difference(first, due[index], run)} from one process",
                    cause_of_training(run, ranks, due, index, cause_if_unknown))


def cause_of_unequal(run, ranks, index):
    """Return the likely cause of snapshots that differ between ranks."""
    runs_alone = each_alone(run, len(ranks))
    if all(close(seen.snapshots[index], alone.snapshots[index]).all() for seen, alone in zip(ranks, runs_alone)):
        return NOT_AVERAGED
    if any((seen.snapshots[index] == seen.snapshots[index - 1]).any() for seen in ranks):
        return NOT_RECEIVED
    return "not every rank receives the updated parameters of each owner"


def cause_of_training(run, ranks, due, index, cause_if_unknown):
    """Return the likely cause of snapshots that are the same on all ranks, and differ from `due` from `index` on."""
    d = len(ranks)
    came = ranks[0].snapshots
    for cause, seen in mistaken_runs(run, d):
        if all(close(*pair).all() for pair in zip(came, seen.snapshots)):
            return cause
    alone = torch.stack([seen.snapshots[1] for seen in each_alone(run, d)])
    # Each element has a value that one rank, its owner, reaches alone.
    if index == 1 and close(alone, came[1]).any(dim=0).all():
        return NOT_AVERAGED
    if cause_if_unknown:
        return cause_if_unknown
    error = (came[index] - due[index]).abs().max()
    move = (due[index] - due[index - 1]).abs().max()
    return ALMOST if error < 0.01 * move else UNKNOWN


def check_norm(run, ranks, due, step):
    """Compare the norms that clip_grad_norm_ has returned in `step` (1, 2, …) with `due`, that of one process."""
    norms = torch.tensor([seen.norms[step - 1] for seen in ranks])
    if not close(norms, due).all():
        raise Wrong("clip_grad_norm_ returns the norm of all averaged gradients, before it clips: "
                    f"{due:.5f} in step {step}",
                    ", ".join(f"{norm:.5f} on rank {rank}" for rank, norm in enumerate(norms)),
                    cause_of_norm(run, ranks, norms, due, step))


def cause_of_norm(run, ranks, norms, due, step):
    """Return the likely cause of wrong norms, one of each rank (d,)."""
    d = len(ranks)
    if close(norms.norm(), due):
        return "each rank takes the norm of its own shard: add up the squares over the ranks, then the root"
    if close(norms, [seen.norms[step - 1] for seen in each_alone(run, d)]).all():
        return "the norm is of this rank's own gradients: average them first"
    for cause, seen in mistaken_runs(run, d):
        if close(ranks[0].norms[:step], seen.norms[:step]).all():
            return cause
    return UNKNOWN
