"""What ranks hold and gather, by their number, and what the host does."""

from harness.report.sheet import Sheet


def state_sheet(states):
    ranks = list(states[0].bytes_per_param)
    notes = ["Rank 0 of d, played by one process."]
    if any("+ b" in row.formula for row in states):
        notes[0] += (" b: the two bucket buffers of stage 4. Below the count in brackets: the formula, where they "
                     "differ by more than 1 % (padding).")
    return Sheet(
        "Model state, bytes a parameter, by number of ranks",
        [("parameters/gradients", ""), ("formula", ""), *((f"d = {d}", "counted") for d in ranks)],
        [[row.name, row.formula, *(_state(row, d) for d in ranks)] for row in states], notes)


def _state(row, d):
    counted, theory = row.bytes_per_param[d], row.bytes_per_param_theory[d]
    return f"{counted:.2f}" if abs(counted - theory) <= 0.01 * theory else f"{counted:.2f}\n({theory:.2f})"


def host_sheet(rows):
    """Of one number of tensors and one d, as make host measures them."""
    plain, first = rows[0].best_ms, rows[0]
    phases = ("forward", "backward", "step", "zero_grad", "whole")
    body = [[row.name, *(f"{row.best_ms[phase]:.2f}" for phase in phases),
             f"{row.best_ms['whole'] / plain['whole']:.2f}", f"{row.median_ms['whole']:.2f}",
             f"{1e3 * row.best_ms['whole'] / row.tensors:.0f}"] for row in rows]
    names = ("", "forw.", "backw.", "step", "zero", "whole", "x plain", "median", "µs/tensor")
    return Sheet(f"Host time of a step in ms, measured: {first.tensors} tensors of 16 x 16, rank 0 of {first.d}",
                 [(name, "") for name in names], body,
                 [f"Best of {first.steps} steps, all rows in turn; median and µs a tensor: of the whole step. "
                  "Messages go nowhere, and nothing is waited for; ddp is in a group of one, on gloo. Buckets of stage "
                  "4: 0.02 MB."])


def gathered_sheet(rows):
    ranks = list(rows[0].over_numel)
    return Sheet(
        "Elements that a step gathers, over those of the model, by number of ranks",
        [("", ""), *((f"d = {d}", "counted") for d in ranks)],
        [[row.name, *(f"{row.over_numel[d]:.2f}" for d in ranks)] for row in rows],
        ["What is above 1.00 is padding."])
