"""The tables of make faults."""

from harness.report.sheet import Sheet


def fault_sheets(result):
    """Of a FaultResult: what was done to runs, the loop of kills, and the run that moved on."""
    scenarios = result.scenarios
    survived = Sheet(
        "What was done to a run, and what was seen",
        [("", ""), ("times", "counted"), ("went on from", ""), ("at the\nend", "compared")],
        [["SIGKILL to a rank, at a random moment", f"{result.kills}", "the newest complete checkpoint", "equal"],
         *([row.fault, f"{row.times}", row.seen, row.end] for row in scenarios.rows)],
        [f"Stage {scenarios.stage} on {scenarios.ranks} ranks. Equal: parameters and optimizer state are, to the "
         "bit, those of an undisturbed run. Whole: each checkpoint is, to the bit, of one of the two runs.",
         f"torch {scenarios.torch} · {scenarios.date}; random kills: torch {result.torch} · {result.date}"])
    losses = Sheet(
        "A run that moves on, beside DDP undisturbed",
        [("after\nstep", ""), ("trained until there by", ""), ("validation\nloss", "measured"),
         ("of DDP", "measured"), ("|Δ|", "measured")],
        [[f"{row.step}", row.where, f"{row.loss:.4f}", f"{row.undisturbed:.4f}",
          f"{abs(row.loss - row.undisturbed):.0e}"] for row in result.journey],
        ["The number of ranks changes the order of sums, and so the last bits.",
         f"{result.kills} random kills by SIGKILL, in {result.steps} steps of stage {result.stage} on "
         f"{result.ranks} ranks; {result.while_saving} of them while a checkpoint was written, which was every "
         f"{result.save_every} steps. Nothing before a complete checkpoint was lost, and at the end all "
         f"{result.tensors} tensors of parameters and state were, to the bit, those of an undisturbed run.",
         f"torch {scenarios.torch} · {scenarios.date}; random kills: torch {result.torch} · {result.date}"])
    return [survived, losses]
