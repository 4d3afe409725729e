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


def mutation_sheet(result):
    """Of a MutationResult: kind of change -> what became of it."""
    rows = [[row.kind, f"{row.refused + row.loaded + row.wrong}", f"{row.refused}", f"{row.loaded}", f"{row.wrong}"]
            for row in result.rows]
    totals = [f"{sum(int(row[column]) for row in rows)}" for column in range(1, 5)]
    return Sheet(
        "Checkpoints that somebody has changed",
        [("", ""), ("tried", "counted"), ("refused", "counted"), ("loaded,\nstepped, saved", "counted"),
         ("wrong", "counted")],
        [*rows, ["together", *totals]],
        ["Checksums were made right again, but of a bit of the manifest. Refused: model and optimizer are what they "
         "were. Wrong: anything else, such as another error, a step that fails, a process that ends, more than 10 s "
         "or 1 GB. Plain torch and stages 1, 3 and 4 on one rank, AdamW, SGD and Adagrad, float32 and bfloat16.",
         f"torch {result.torch} · {result.date} · seed {result.seed}"])
