"""What was measured, as tables. Input: the result of measure.measure, as bench.py and harness.measure.network write it.

Each column says where its figure comes from: measured (clock, subtraction), counted (ledger, memory), or a formula.
"""

import io
import statistics
from typing import NamedTuple

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.measure.memory import KINDS
from harness.rows import buckets

NONE = "–"
EXPOSED = ("Exposed: communication during which nothing computes, in the median of five recorded steps, on the rank "
           "with more of it.")


class Sheet(NamedTuple):
    """One table, in words. `columns`: (name, where it comes from); `rows`: lists of cells; `notes`: lines below."""
    title: str
    columns: list
    rows: list
    notes: list


def sheets(result):
    """-> list of Sheets: time and traffic; floors, where there is a line; memory, correctness; model state."""
    rows, conditions = result["rows"], result["conditions"]
    wire_notes = Notes()
    time = Sheet(
        "Time and traffic of a step",
        [("", ""), ("ms/step\nmedian", "measured"), ("min–max", "measured"), ("x ddp", "measured"),
         ("exposed\nms", "measured"), ("collectives", "counted"), ("MB sent\na rank", "counted"), ("", "formula")],
        [[_label(row), *_time(row, conditions), _exposed(row), collectives(row), *_wire(row, conditions, wire_notes)]
         for row in rows],
        ["x ddp: median of the ratios round by round. MB: 10⁶ bytes, mean over the ranks.",
         *[EXPOSED] * any("timeline" in row for row in rows), *_noise_note(conditions), *wire_notes, *failures(rows)])
    line = [line_sheet(result)] if "bits_per_second" in conditions else []
    state = [state_sheet(result["model_state"])] if "model_state" in result else []
    gathered = [gathered_sheet(result["gathered"])] if "gathered" in result else []
    accumulation = [accumulation_sheet(result["accumulation"]["rows"])] if "accumulation" in result else []
    host = [host_sheet(rows) for rows in result.get("host", [])]
    if accumulation and "ddp" in result["accumulation"]:
        accumulation.append(share_sheet(result["accumulation"]))
    caps = [caps_sheet(result["caps"])] if "caps" in result else []
    sweep = [buckets_sheet(result["sweep"])] if "sweep" in result else []
    return [time, *line, *sweep, *accumulation, *memory_sheets(result), *state, *gathered, *caps, *host]


def memory_sheets(result):
    """-> Sheets: memory and correctness; and of what kind it is, where that was counted: older results lack it."""
    rows, conditions, memory_notes = result["rows"], result["conditions"], Notes()
    has_16_bits = any(row["dtype"] != "float32" for row in rows)
    of_16_bits = ", in 16 bits from replicated training with fp32 copies" * has_16_bits
    memory = Sheet(
        "Memory of a rank, and the difference from ddp",
        [("", ""), ("model\ninit", "counted"), ("optimizer\ninit", "counted"), ("forward\nbackward", "counted"),
         ("step", "counted"), *((key, "counted") for key in _peaks(conditions)), ("bytes a\nparam.", "counted"),
         ("", "formula"), ("largest\n|Δ|", "measured")],
        [[_label(row), *_memory(row, conditions), *_bytes_per_param(row, memory_notes), _difference(row)]
         for row in rows if row["kind"] != "noise"],
        ["Memory after each phase in MB, of the rank that holds most. Bytes a parameter: parameters, gradients and "
         "optimizer state after a step, mean over the ranks.",
         f"Largest |Δ|: of any parameter on any rank, from ddp{of_16_bits}, after 3 steps; "
         f"allowed: {_number(conditions['tolerance'])}.",
         *memory_notes])
    return [memory, *[kinds_sheet(rows)] * any("held_bytes" in row for row in rows)]


def kinds_sheet(rows):
    """The peak within each phase of a step, and what it comes from. Counted."""
    def cells(row):
        peaks, held = row.get("peak_bytes", {}), row.get("held_bytes", {})
        found = [*(peaks.get(phase) for phase in ("build", "forward", "backward", "step")),
                 *(held.get(kind) for kind in KINDS), row.get("activation_bytes")]
        return [_label(row), *(NONE if n_bytes is None else _megabytes(n_bytes) for n_bytes in found)]
    return Sheet(
        "Peak within each phase, and what a rank holds after a step, counted, in MB",
        [(name, "") for name in ("", "peak:\nbuild", "\nforward", "\nbackward", "\nstep", "held:\nparam.", "\ngrads",
                                 "\nstate", "\nbuffers", "activa-\ntions")],
        [cells(row) for row in rows if row["kind"] != "noise"],
        ["Forward, backward and step: of the second step, which finds a state. The four kinds add up to all that is "
         "held, on the rank that holds most. State: moments and main parameters. Buffers: what is left, such as the "
         "bucket buffers of stage 4; the one buffer of stage 3 and DDP's buckets are gradients. Activations: what the "
         "forward pass leaves for the backward pass."])


def _megabytes(n_bytes):
    """In few digits: tens of thousands of MB have no decimal."""
    return f"{n_bytes / 1e6:.1f}" if n_bytes < 1e9 else f"{n_bytes / 1e6:.0f}"


def _label(row):
    """The name, in two lines where it has a bucket size: the table has to fit a terminal."""
    return row["name"].replace(", ", ",\n  ")


def buckets_sheet(sweep):
    """The time of each row by the size of its buckets; of stage 4 also what the size costs in messages and memory."""
    found = {}  # size -> base -> row
    for row in sweep["rows"]:
        found.setdefault(buckets.size_of(row["name"]), {})[buckets.base_of(row["name"])] = row
    order = [*(buckets.size_of(buckets.peers.sized_name("", size)) for size in buckets.SIZES), "default"]

    def cells(size):
        rows = found[size]
        stage4 = rows.get(buckets.STAGE_4, {})
        times = [f"{row['step_ms']['median']:.0f}" if (row := rows.get(base, {})).get("step_ms") else NONE
                 for base in (*buckets.PEERS, buckets.STAGE_4)]
        sent = stage4.get("collectives", {})
        n_buckets = sent.get("send", 0) or sent.get("reduce_scatter", 0)
        held = f"{stage4['bytes_per_param']:.2f}" if "bytes_per_param" in stage4 else NONE
        return [size, *times, str(n_buckets or NONE), held]
    c = sweep["conditions"]
    return Sheet(
        "Bucket size, ms a step",
        [("", ""), ("ddp\n", "measured"), *((f"ddp +\n{name.split()[-2]} {name.split()[-1]}", "measured")
                                           for name in buckets.PEERS[1:]),
         ("stage 4\n", "measured"), ("its messages\nof gradients", "counted"),
         ("its bytes a\nparameter", "counted")],
        [cells(size) for size in order if size in found],
        [f"Medians of {c['rounds']} round(s) of {c['steps']} steps. DDP's default is 25 MB. The model's gradients have "
         f"{c['parameters'] * 4 / 1e6:.1f} MB.", *failures(sweep["rows"])])


def failures(rows):
    return [f"{row['name']}: {row['error']}" for row in rows if "error" in row]


def accumulation_sheet(accumulation):
    def spread(times):
        return f"{statistics.median(times):.0f} ({min(times):.0f}–{max(times):.0f})"
    ratios = [[each / once for once, each in zip(one["no_sync_ms"], one["each_ms"])] for one in accumulation]
    noise = max(abs(ratio - 1) for ratio in ratios[0])  # with one micro-batch both ways are the same
    medians = [statistics.median(of_rounds) for of_rounds in ratios]
    rows = [[str(one["micro_batches"]), spread(one["no_sync_ms"]), spread(one["each_ms"]),
             f"{median:.2f}{'~' * (abs(median - 1) <= noise)}"] for one, median in zip(accumulation, medians)]
    counts = [one["micro_batches"] for one in accumulation]
    dearer = [count for i, count in enumerate(counts) if min(medians[i:]) > 1 + noise]
    where = f"from {dearer[0]} micro-batches a step on," if dearer else f"no number up to {counts[-1]} from which on"
    return Sheet(
        "Accumulation in stage 4, ms a micro-batch",
        [("micro-batches\na step", ""), ("in no_sync:\none exchange", "measured"),
         ("without:\nan exchange each", "measured"), ("x no_sync", "measured")], rows,
        ["Median (min–max). In no_sync whole gradients stay on each rank, 4 bytes a parameter in fp32; without, they "
         "are reduced into the shard.",
         f"Break-even: {where} an exchange each costs more time than the noise of this run.",
         f"~ within that noise: with one micro-batch both are the same, and were up to {noise:.0%} apart in a round."])


SHARES = {"ddp_ms": "DDP", "stage3_ms": "stage 3", "stage4_ms": "stage 4"}


def shares(one):
    """Of one number of micro-batches: what communication takes of a step -> {"ddp_ms": median over rounds, …}."""
    times = {**one, "stage4_ms": one["no_sync_ms"]}
    return {key: statistics.median(1 - alone / mine for alone, mine in zip(one["compute_ms"], times[key]))
            for key in SHARES}


def share_sheet(accumulation):
    """Of a result's "accumulation", where it has the time of computing alone."""
    rows = [[str(one["micro_batches"]), f"{statistics.median(one['compute_ms']):.0f}",
             *(f"{share:.0%}" for share in shares(one).values())] for one in accumulation["rows"]]
    return Sheet(
        "What communication takes of a step, one exchange a step",
        [("micro-batches\na step", ""), ("compute only,\nms a micro-batch", "measured"),
         *((f"{name}\n", "measured") for name in SHARES.values())], rows,
        ["1 - compute only / this row, of the time of a micro-batch; medians, round by round. "
         f"DDP: the row {accumulation['ddp']}."])


def line_sheet(result):
    """What no row can be faster than, and stage 4 beside each row: ratios round by round."""
    times = {row["name"]: row["step_ms"]["rounds"] for row in result["rows"] if row["step_ms"]}
    is_line_counted = any("line_bytes" in row for row in result["rows"])
    rate = result["conditions"]["bits_per_second"]

    def ratio(ones, others):
        pairs = list(zip(ones or [], others or []))
        return f"{statistics.median(one / other for one, other in pairs):.2f}" if pairs else NONE
    rows = []
    for row in result["rows"]:
        bf16 = " bf16" if row["dtype"] == "bfloat16" else ""
        others = "compute only" + bf16, "stage 4 overlap" + bf16
        mine, compute, stage4 = (times.get(name) for name in (row["name"], *others))
        if "wire_bytes_theory" not in row:  # it has failed
            rows.append([_label(row), *[NONE] * 7])
            continue
        by_formula, sent = (n_bytes * 8 / rate * 1000 for n_bytes in (
            row["wire_bytes_theory"], row.get("line_bytes", row["wire_bytes"])))
        floors, floors_sent = ([max(line_ms, one) for one in compute or []] for line_ms in (by_formula, sent))
        median, spread, _ = _time(row, result["conditions"])
        rows.append([_label(row), f"{median} ({spread})" if mine else NONE, _exposed(row), f"{by_formula:.0f}",
                     f"{sent:.0f}", ratio(mine, floors), ratio(mine, floors_sent), ratio(stage4, mine)])
    how = ("as its interface counted them, with headers" if is_line_counted else
           "as counted by the collectives, gloo's reduce-scatter twice")
    return Sheet(
        f"What the line of {result['conditions']['rate']} allows",
        [("", ""), ("ms a step\nmedian (min–max)", "measured"), ("exposed\nms", "measured"),
         ("line\nms", "formula"), ("as sent\nms", "measured" if is_line_counted else "counted"),
         ("x floor", "measured"), ("x floor\nas sent", "measured"), ("stage 4\nx this", "measured")], rows,
        [EXPOSED,
         f"Line: bytes by the formula, over the rate. As sent: the bytes that were really sent, {how}, over the rate. "
         "Floor: the larger of compute only, of the same dtype, and the line's time, by one or the other. Ratios: "
         "medians, round by round.",
         *(["compute + bytes: while it computes as many bytes travel as in stage 4, and nothing waits for them before "
            "the step ends."] if "compute + bytes" in times else []), *failures(result["rows"])])


def machines_sheet(results):
    """Of results of harness.measure.network on several machines, what `line_sheet` says of stage 4: a row each."""
    rows = []
    for result in results:
        cells = {row[0]: row for row in line_sheet(result).rows}
        tuned = buckets.tuned(result, "ddp")
        names = "compute only", "ddp", _label(tuned) if tuned else None, "ddp + torch ZeRO", "fsdp2", "stage 4 overlap"
        compute, ddp, best, zero, fsdp2, stage4 = (cells.get(name, [NONE] * 8) for name in names)
        rows.append([result["conditions"]["rate"], result["conditions"]["machine"], compute[1].split()[0], stage4[3],
                     best[7], ddp[7], zero[7], fsdp2[7], stage4[5]])
    return Sheet(
        "Stage 4 on several machines",
        [("", ""), ("", ""), ("compute\nonly ms", "measured"), ("the line\nms", "formula"),
         ("x ddp\ntuned", "measured"), ("x ddp\ndefault", "measured"), ("x torch\nZeRO", "measured"),
         ("x fsdp2", "measured"), ("x floor", "measured")], rows,
        ["x: the time of stage 4 over that of this row, as in each machine's own table above. Tuned: DDP with the "
         "bucket size that was best on this line; – where none was tried."])


def state_sheet(states):
    ranks = list(states[0]["bytes_per_param"])
    notes = ["Rank 0 of d, played by one process."]
    if any("+ b" in row["formula"] for row in states):
        notes[0] += (" b: the two bucket buffers of stage 4. Below the count in brackets: the formula, where they "
                     "differ by more than 1 % (padding).")
    return Sheet(
        "Model state, bytes a parameter, by number of ranks",
        [("parameters/gradients", ""), ("formula", ""), *((f"d = {d}", "counted") for d in ranks)],
        [[row["name"], row["formula"], *(_state(row, d) for d in ranks)] for row in states], notes)


def _state(row, d):
    counted, theory = row["bytes_per_param"][d], row["bytes_per_param_theory"][d]
    return f"{counted:.2f}" if abs(counted - theory) <= 0.01 * theory else f"{counted:.2f}\n({theory:.2f})"


def host_sheet(rows):
    """Of one number of tensors and one d, as harness.measure.host measures them."""
    plain, first = rows[0]["best_ms"], rows[0]
    phases = ("forward", "backward", "step", "zero_grad", "whole")
    body = [[row["name"], *(f"{row['best_ms'][phase]:.2f}" for phase in phases),
             f"{row['best_ms']['whole'] / plain['whole']:.2f}", f"{row['median_ms']['whole']:.2f}",
             f"{1e3 * row['best_ms']['whole'] / row['tensors']:.0f}"] for row in rows]
    names = ("", "forw.", "backw.", "step", "zero", "whole", "x plain", "median", "µs/tensor")
    return Sheet(f"Host time of a step in ms, measured: {first['tensors']} tensors of 16 x 16, rank 0 of {first['d']}",
                 [(name, "") for name in names], body,
                 [f"Best of {first['steps']} steps, all rows in turn; median and µs a tensor: of the whole step. "
                  "Messages go nowhere, and nothing is waited for; ddp is in a group of one, on gloo. Buckets of stage "
                  "4: 0.02 MB."])


def gathered_sheet(rows):
    ranks = list(rows[0]["over_numel"])
    return Sheet(
        "Elements that a step gathers, over those of the model, by number of ranks",
        [("", ""), *((f"d = {d}", "counted") for d in ranks)],
        [[row["name"], *(f"{row['over_numel'][d]:.2f}" for d in ranks)] for row in rows],
        ["What is above 1.00 is padding."])


def caps_sheet(rows):
    return Sheet(
        f"The default bucket of stage 4, fp32, {rows[0]['ranks']} ranks",
        [("", ""), ("model\nMB", "counted"), ("buckets\n", "counted"), ("their MB,\nmedian", "counted"),
         ("\nlargest", "counted"), ("b, native\n", "counted"), ("b, exchanged\n", "counted"),
         ("bytes a\nparameter", "counted")],
        [[row["model"], f"{row['model_bytes'] / 1e6:,.1f}", str(row["buckets"]),
          *(f"{row[key] / 1e6:.1f}" for key in ("median_bytes", "largest_bytes")),
          *(f"{row[key]:.2f}" for key in ("b_native", "b_exchanged", "bytes_per_param"))] for row in rows],
        ["b: bytes a parameter of the two bucket buffers, with a native reduce-scatter (NCCL), or where parts are "
         "exchanged (gloo). The last column: 4 + 12/d + b, native; stages 1 to 3 hold 8 + 8/d."])


class Notes(list):
    """Footnotes: `mark(reason)` gives the sign to put beside a figure. The same reason has the same sign."""

    def mark(self, reason):
        lines = [line.split(" ", 1)[1] for line in self]
        if reason not in lines:
            self.append(f"{'*' * (len(self) + 1)} {reason}")
            lines.append(reason)
        return "*" * (lines.index(reason) + 1)


def _time(row, conditions):
    if row["step_ms"] is None:
        return [NONE, NONE, NONE]
    times, ratio = row["step_ms"], NONE
    if row["vs_reference"] is not None:
        is_noise = row["kind"] != "reference" and abs(row["vs_reference"] - 1) <= _noise(conditions)
        ratio = f"{row['vs_reference']:.2f}{'~' * is_noise}"
    return [f"{times['median']:.0f}", f"{times['min']:.0f}–{times['max']:.0f}", ratio]


def _noise(conditions):
    """How far two timings of the same thing were apart in any round: 0.05 is 5 %."""
    return max((abs(ratio - 1) for ratio in conditions.get("noise", [])), default=0)


def _noise_note(conditions):
    """What `~` means, with the ratios that say it; nothing where nothing was timed twice."""
    ratios = conditions.get("noise")
    return [f"~ within the noise of this run: ddp, timed again in each round, took {min(ratios):.2f} to "
            f"{max(ratios):.2f} times as long, {_noise(conditions):.0%} off at most."] if ratios else []


def _exposed(row):
    exposed = [step["exposed_seconds"] * 1000 for step in row.get("timeline", [])]
    return f"{max(exposed):.0f}" if exposed else NONE


def collectives(row):
    counts = row.get("collectives", {})
    return "\n".join(f"{count} {kind.replace('_', '-')}" for kind, count in counts.items()) or NONE


def _wire(row, conditions, notes):
    if "wire_bytes" not in row:
        return [NONE, NONE]
    counted, theory = row["wire_bytes"], row["wire_bytes_theory"]
    mark = ""
    if _differ(counted, theory):
        is_gloo = conditions["backend"] == "gloo" and "reduce_scatter" in row["collectives"]
        mark = notes.mark("gloo's reduce-scatter is an all-reduce underneath: it sends twice the bytes." if is_gloo else
                          "more than the formula: padding, and flags on which the ranks agree.")
    return [f"{counted / 1e6:.1f}{mark}", f"{theory / 1e6:.1f}"]


def _peaks(conditions):
    """What there is of the largest moment: bytes of tensors, and on CUDA what torch's allocator took for them."""
    return ["peak", "reserved"] if conditions["device"] == "cuda" else ["peak"]


def _memory(row, conditions):
    phases = row.get("memory_bytes")
    keys = ("model", "optimizer", "backward", "step", *_peaks(conditions))
    return [f"{phases[key] / 1e6:.1f}" if phases else NONE for key in keys]


def _bytes_per_param(row, notes):
    if "bytes_per_param" not in row:
        return [NONE, NONE]
    counted, theory = row["bytes_per_param"], row["bytes_per_param_theory"]
    reason = "not the formula's: padding, shards that are not equal, or tensors that live on after the step."
    mark = notes.mark(reason) if _differ(counted, theory) else ""
    return [f"{counted:.2f}{mark}", f"{theory:.2f}"]


def _differ(counted, theory):
    return abs(counted - theory) > 0.005 * theory


def _difference(row):
    return NONE if row["max_abs_diff"] is None else _number(row["max_abs_diff"])


def _number(value):
    return "0" if value == 0 else f"{value:.1e}"


def plan_sheets(result):
    """Of harness/plan/plan.py: what a rank holds, the same by number of ranks, time, and what the check found."""
    check = plan_check_sheets(result["check"]) if result.get("check") else []
    return [plan_memory_sheet(result), state_sheet(result["rows"]), plan_time_sheet(result), *check]


def plan_memory_sheet(result):
    c, rows = result["conditions"], []
    for row in result["rows"]:
        figures = [*row["held"].values(), row["padding"], c["activations"], row["peak"]]
        name = row["name"].replace(", ", ",\n")
        rows.append([name, *(f"{n_bytes / 1e9:.2f}" for n_bytes in figures), str(row["fits_from"] or NONE)])
    names = ("params", "grads", "main", "moments", "buffers", "padding", "activ.", "peak", "fits\nfrom d")
    return Sheet(
        f"What a rank of {c['world']} holds, in GB: {c['model']}, {c['parameters']:,} parameters a rank",
        [("", ""), *((name, "counted") for name in names)], rows,
        ["GB: 10⁹ bytes, after a step, on rank 0. main: fp32 copies of 16-bit parameters. buffers: those that buckets "
         "travel in. padding: of all these, what is more than the formula: of padded, or of uneven, shards. "
         f"activ.: of a micro-batch of {c['batch_size']} x {c['sequence_length']}. peak: the most at one "
         f"moment of a step. fits from d: of the d below, the one from which on the peak is at most "
         f"{c['device_memory']:g} GB; torch's allocator takes more, and stage 4 that accumulates in no_sync() whole "
         "gradients. Buckets are those that are best on most ranks."])


def plan_time_sheet(result):
    c = result["conditions"]
    tokens = c["batch_size"] * c["sequence_length"] * c["accumulate"] / c["tensor_parallel"]
    return Sheet(
        f"A step of {c['model']} on {c['world'] * c['tensor_parallel']} x {c['device']}",
        [("", ""), ("ms a step", "modelled"), ("exposed ms", "modelled"), ("tokens/s\na device", "modelled")],
        [[row["name"], *(f"{1e3 * row['step'][key]:,.0f}" for key in ("seconds", "exposed_seconds")),
          f"{tokens / row['step']['seconds']:,.0f}"] for row in result["rows"]],
        [f"Assumed: {c['flops'] / 1e12:.0f} TFLOP/s, {c['efficiency']:.0%} of what the maker states, "
         f"{c['memory_rate'] / 1e12:.2f} TB/s of memory, rings of {c['in_node'] / 1e9:.0f} GB/s in a node and "
         f"{c['between'] / 1e9:.0f} GB/s between nodes of {c['per_node']}, {c['latency_in_node'] * 1e6:.0f} and "
         f"{c['latency_between'] * 1e6:.0f} µs a hop. Nobody is late, Python takes no time, tensor parallelism sends "
         f"nothing. {c['accumulate']} micro-batch(es) a step. exposed: the device waits for messages."])


def plan_check_sheets(check):
    def error(measured, modelled):
        return f"{modelled / measured - 1:+.1%}"
    steps, runs = {}, check["published"]["rows"]
    for where, row, measured, modelled in check["two_hosts"]:
        base = row.split(",")[0] + ", accumulating" * (" x " in row)
        steps.setdefault((where, base), []).append((modelled / measured - 1, row))
    beyond = [f"{row} in {where}, {error:+.1%}" for (where, _), found in steps.items() for error, row in found
              if abs(error) > 0.1]
    (flops, _), (users_flops, users_line) = check["published"]["hardware"]
    return [
        Sheet("Two hosts: modelled beside measured steps, or micro-batches",
              [("", ""), ("", ""), ("rows", ""), ("from\nerror", "modelled"), ("to\nerror", "modelled")],
              [[where, row, f"{len(found)}", f"{min(found)[0]:+.1%}", f"{max(found)[0]:+.1%}"]
               for (where, row), found in steps.items()],
              ["The rate of computing is calibrated on compute only. Assumed: 5 GB/s of memory, 200 µs a message, 1448 "
               "of 1514 bytes on the line are data, sending takes no time of the one core that computes, and a table "
               "without compute only computed as fast as the one with it.",
               f"Further off than 10 %: {'; '.join(beyond) or 'none'}. Where computing is the limit, the model leaves "
               "out what sending and Python take of the core that computes: compute + bytes shows a part of it."]),
        Sheet("LLaMA-13B on 8 x A100 a node: tokens/s a GPU",
              [("", ""), ("", ""), ("GPUs", ""), ("sequences\na step", ""), ("", "published"), ("", "modelled"),
               ("error", "modelled")],
              [[what, kind, f"{gpus}", f"{sequences}", f"{found:,.0f}", f"{modelled:,.0f}", error(found, modelled)]
               for what, kind, gpus, sequences, _, found, modelled in runs],
              ["256 and 512 GPUs: Megatron-LLaMA's README; 128 GPUs: a user, issue 22 there. Calibrated: computing "
               f"on the first row, {flops:.0f} TFLOP/s; below, on the user's two rows, {users_flops:.0f} TFLOP/s and "
               f"{users_line:.0f} of 100 GB/s between nodes. none hidden: each message is waited for at once.",
               "Assumed: 2 GPUs share a layer, sequences of 2048, 2048 of them a step with 256 and 512 GPUs, 4 a "
               "micro-batch, the user's 2; overlapped: stage 4 with buckets of 400 MiB, and fp32 gradients sent after "
               "each micro-batch; distributed: stage 3, once a step."])]


def conditions_line(conditions):
    c = conditions
    shared = f" that share {c['gpus']} GPU(s)" if 0 < c.get("gpus", 0) < c["ranks"] else ""
    hosts = f" on {c['hosts']} hosts of {c['cores_per_host']} core(s)" if "cores_per_host" in c else ""
    tcp = f", TCP {c['tcp']}" if "tcp" in c else ""
    return " · ".join([
        c["machine"], f"torch {c['torch']}",
        f"{c['backend']}, {c['ranks']} rank(s) x {c['threads_per_rank']} thread(s){shared}{hosts}{tcp}",
        f"{c['model']}: {c['parameters']:,} parameters, {c['dtype']}, AdamW",
        f"a rank's batch: {c['batch_size']} x {c['sequence_length']} bytes",
        f"{c['rounds']} rounds of {c['steps']} steps", f"{c['date']}{commit_of(c)}"])


def commit_of(conditions):
    """Of which code the figures are; older results don't say."""
    return f" · commit {conditions['commit']}" if "commit" in conditions else ""


def show(result):
    """Prints all tables."""
    console = Console(highlight=False)
    console.width = max(console.width, width(result["conditions"]))
    for sheet in sheets(result):
        console.print(_rich_table(sheet), "", *map(_dim, sheet.notes), "", sep="\n")
    console.print(_dim(conditions_line(result["conditions"])))


def _rich_table(sheet):
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for name, source in sheet.columns:
        table.add_column(f"{name}\n[dim]{source}[/dim]", no_wrap=True,
                         justify="left" if _is_text((name, source)) else "right")
    for cells in sheet.rows:
        table.add_row(*map(escape, cells))
    return table


def _is_text(column):
    return column in (("", ""), ("collectives", "counted"), ("parameters/gradients", ""), ("formula", ""),
                      ("went on from", ""))


def _dim(text):
    return f"[dim]{escape(text)}[/dim]"


def width(conditions):
    """Columns that the tables of a result are made for: on CUDA memory has one more."""
    return 110 if conditions["device"] == "cuda" else 100


def sheet_text(sheet, columns=100):
    """A sheet as it looks in a terminal of so many columns, without colours."""
    console = Console(file=io.StringIO(), width=columns, color_system=None, highlight=False)
    console.print(_rich_table(sheet), "", *map(_dim, sheet.notes), sep="\n")
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
