"""Time by bucket size, and stage 4's default."""

from harness.report.cells import failures
from harness.report.sheet import NONE, Sheet
from harness.rows import bucket_sizes
from harness.rows.choice import Choice


def buckets_sheet(sweep):
    """The time of each row by the size of its buckets; of stage 4 also what the size costs in messages and memory."""
    found = {row.choice: row for row in sweep.rows}
    bases = (*bucket_sizes.PEERS, bucket_sizes.STAGE_4)

    def cells(bucket_mb):
        rows = [found.get((base, bucket_mb)) for base in bases]
        times = [f"{row.median_ms:.0f}" if row and row.rounds_ms else NONE for row in rows]
        stage4 = rows[-1]
        if stage4 is None or stage4.bytes_per_param is None:
            return [Choice("", bucket_mb).size, *times, NONE, NONE]
        n_buckets = stage4.collectives.get("send", 0) or stage4.collectives.get("reduce_scatter", 0)
        return [Choice("", bucket_mb).size, *times, str(n_buckets or NONE), f"{stage4.bytes_per_param:.2f}"]
    c = sweep.conditions
    return Sheet(
        "Bucket size, ms a step",
        [("", ""), ("ddp\n", "measured"), *((f"ddp +\n{base.removeprefix('ddp + ')}", "measured")
                                           for base in bucket_sizes.PEERS[1:]),
         ("stage 4\n", "measured"), ("its messages\nof gradients", "counted"),
         ("its bytes a\nparameter", "counted")],
        [cells(size) for size in (*bucket_sizes.SIZES, None) if any(choice.bucket_mb == size for choice in found)],
        [f"Medians of {c.rounds} round(s) of {c.steps} steps. DDP's default is {bucket_sizes.DEFAULT_MB} MB. The "
         f"model's gradients have {c.parameters * 4 / 1e6:.1f} MB.", *failures(sweep.rows)])


def caps_sheet(rows):
    return Sheet(
        f"The default bucket of stage 4, fp32, {rows[0].ranks} ranks",
        [("", ""), ("model\nMB", "counted"), ("buckets\n", "counted"), ("their MB,\nmedian", "counted"),
         ("\nlargest", "counted"), ("b, native\n", "counted"), ("b, exchanged\n", "counted"),
         ("bytes a\nparameter", "counted")],
        [[row.model, f"{row.model_bytes / 1e6:,.1f}", str(row.buckets),
          *(f"{n_bytes / 1e6:.1f}" for n_bytes in (row.median_bytes, row.largest_bytes)),
          *(f"{held:.2f}" for held in (row.b_native, row.b_exchanged, row.bytes_per_param))] for row in rows],
        ["b: bytes a parameter of the two bucket buffers, with a native reduce-scatter (NCCL), or where parts are "
         "exchanged (gloo). The last column: 4 + 12/d + b, native; stages 1 to 3 hold 8 + 8/d."])
