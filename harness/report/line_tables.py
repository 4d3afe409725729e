"""What a line allows: no row can be faster than that, and how near is it?"""

import statistics

from harness.report.cells import EXPOSED, exposed_cell, failures, label_of, time_cells
from harness.report.sheet import NONE, Sheet
from harness.rows import bucket_sizes


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
            rows.append([label_of(row), *[NONE] * 7])
            continue
        by_formula, sent = (n_bytes * 8 / rate * 1000 for n_bytes in (
            row["wire_bytes_theory"], row.get("line_bytes", row["wire_bytes"])))
        floors, floors_sent = ([max(line_ms, one) for one in compute or []] for line_ms in (by_formula, sent))
        median, spread, _ = time_cells(row, result["conditions"])
        rows.append([label_of(row), f"{median} ({spread})" if mine else NONE, exposed_cell(row), f"{by_formula:.0f}",
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
    """Of results of make network on several machines, what `line_sheet` says of stage 4: a row each."""
    rows = []
    for result in results:
        cells = {row[0]: row for row in line_sheet(result).rows}
        tuned = bucket_sizes.tuned(result, "ddp")
        names = ("compute only", "ddp", label_of(tuned) if tuned else None, "ddp + torch ZeRO", "fsdp2",
                 bucket_sizes.STAGE_4)
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
