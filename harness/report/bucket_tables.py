"""Time by bucket size, and stage 4's default."""

from harness.report.cells import failures
from harness.report.sheet import NONE, Sheet
from harness.rows import bucket_sizes, catalogue


def buckets_sheet(sweep):
    """The time of each row by the size of its buckets; of stage 4 also what the size costs in messages and memory."""
    found = {}  # size -> base -> row
    for row in sweep["rows"]:
        found.setdefault(bucket_sizes.size_of(row["name"]), {})[bucket_sizes.base_of(row["name"])] = row
    order = [*(bucket_sizes.size_of(catalogue.sized_name("", size)) for size in bucket_sizes.SIZES), "default"]

    def cells(size):
        rows = found[size]
        stage4 = rows.get(bucket_sizes.STAGE_4, {})
        times = [f"{row['step_ms']['median']:.0f}" if (row := rows.get(base, {})).get("step_ms") else NONE
                 for base in (*bucket_sizes.PEERS, bucket_sizes.STAGE_4)]
        sent = stage4.get("collectives", {})
        n_buckets = sent.get("send", 0) or sent.get("reduce_scatter", 0)
        held = f"{stage4['bytes_per_param']:.2f}" if "bytes_per_param" in stage4 else NONE
        return [size, *times, str(n_buckets or NONE), held]
    c = sweep["conditions"]
    return Sheet(
        "Bucket size, ms a step",
        [("", ""), ("ddp\n", "measured"), *((f"ddp +\n{name.split()[-2]} {name.split()[-1]}", "measured")
                                           for name in bucket_sizes.PEERS[1:]),
         ("stage 4\n", "measured"), ("its messages\nof gradients", "counted"),
         ("its bytes a\nparameter", "counted")],
        [cells(size) for size in order if size in found],
        [f"Medians of {c['rounds']} round(s) of {c['steps']} steps. DDP's default is 25 MB. The model's gradients have "
         f"{c['parameters'] * 4 / 1e6:.1f} MB.", *failures(sweep["rows"])])


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
