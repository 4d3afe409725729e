"""Compares the parameters and gradient norms of ranks with those of one process that has the batches of all ranks.

Ranks are processes that train together, with a learner's optimizer. Where they differ from the one process,
check_params and check_norm raise Wrong, a verdict with the likely cause. To find the cause they try known mistakes:
mistaken_runs trains one process with each mistake. A mistake that gives what the ranks have is the cause.

Arguments. run: a Run (grade/runs.py), which describes how all have trained. ranks: for each rank its Seen, what was
noted there. A snapshot (numel,) has all parameters of the model: snapshots[0] at the start, and snapshots[index] after
step `index`.
"""

import torch

from grade.by_hand import ALMOST, NOT_AVERAGED, NOT_RECEIVED
from grade.grader import UNKNOWN, Wrong
from grade.mistakes import each_alone, mistaken_runs


def close(a, b):
    """Return a mask of the elements that are equal up to rounding.

    Right packages may differ by rounding: with three or more ranks the order of a sum depends on a package's buffers.
    """
    return torch.isclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-4, atol=2e-6)


def difference(came, due, run):
    """Return in words how two snapshots differ: "2.weight, 2.bias differ by up to 0.12"."""
    differs = ~close(came, due)
    if not differs.any():
        differs = came != due  # if no element differs by more than rounding, name those that differ at all
    params = dict(run.model(0).named_parameters())
    # For each parameter its part of the mask.
    masks = differs.split([param.numel() for param in params.values()])
    names = [name for name, mask in zip(params, masks) if mask.any()]
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    verb = "differs" if len(names) == 1 else "differ"
    return f"{', '.join(names[:3])}{rest} {verb} by up to {(came - due).abs().max():.2g}"


def check_params(run, ranks, due, index, cause_if_unknown):
    """Raise Wrong unless snapshots[index] is the same on all ranks, and close to due[index].

    due: the snapshots of one process. cause_if_unknown: the cause to name if no known mistake fits; "" for none.
    """
    # A run with prefetch has only two snapshots, of the start and after the last step.
    when = f"after step {run.steps if run.prefetch else index}"
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
    runs_alone = each_alone(run, len(ranks))  # for each rank the Seen of one process that has only its batches
    if all(close(seen.snapshots[index], alone.snapshots[index]).all() for seen, alone in zip(ranks, runs_alone)):
        return NOT_AVERAGED
    # Whether an element of some rank is as it was before the step.
    if any((seen.snapshots[index] == seen.snapshots[index - 1]).any() for seen in ranks):
        return NOT_RECEIVED
    return "not every rank receives the updated parameters of each owner"


def cause_of_training(run, ranks, due, index, cause_if_unknown):
    """Return the likely cause if snapshots are the same on all ranks, and differ from `due` from `index` on."""
    d = len(ranks)
    came = ranks[0].snapshots  # what came in place of `due`
    for cause, seen in mistaken_runs(run, d):
        if all(close(*pair).all() for pair in zip(came, seen.snapshots)):
            return cause
    # (d, numel): the snapshots after step 1 of d processes, which each train on one rank's batches. If the ranks have
    # each element from one of these, each owner has stepped with its own gradients and sent the result.
    alone = torch.stack([seen.snapshots[1] for seen in each_alone(run, d)])
    if index == 1 and close(alone, came[1]).any(dim=0).all():
        return NOT_AVERAGED
    if cause_if_unknown:
        return cause_if_unknown
    error = (came[index] - due[index]).abs().max()
    move = (due[index] - due[index - 1]).abs().max()  # the longest way that an element should move in the step
    return ALMOST if error < 0.01 * move else UNKNOWN


def check_norm(run, ranks, due_norm, step):
    """Raise Wrong unless clip_grad_norm_ has returned one process's norm, `due_norm`, on all ranks in `step` (1, …)."""
    norms = torch.tensor([seen.norms[step - 1] for seen in ranks])
    if not close(norms, due_norm).all():
        raise Wrong("clip_grad_norm_ returns the norm of all averaged gradients, before it clips: "
                    f"{due_norm:.5f} in step {step}",
                    ", ".join(f"{norm:.5f} on rank {rank}" for rank, norm in enumerate(norms)),
                    cause_of_norm(run, ranks, norms, due_norm, step))


def cause_of_norm(run, ranks, norms, due_norm, step):
    """Return the likely cause of wrong norms. norms (d,): what clip_grad_norm_ has returned on each rank in `step`."""
    d = len(ranks)
    if close(norms.norm(), due_norm):  # the root of the sum of the squares of the ranks' norms
        return "each rank takes the norm of its own shard: add up the squares over the ranks, then the root"
    if close(norms, [seen.norms[step - 1] for seen in each_alone(run, d)]).all():
        return "the norm is of this rank's own gradients: average them first"
    for cause, seen in mistaken_runs(run, d):
        if close(ranks[0].norms[:step], seen.norms[:step]).all():
            return cause
    return UNKNOWN
