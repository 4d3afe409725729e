"""The tables of make plan."""

from harness.report.sheet import NONE, Sheet
from harness.report.state_tables import state_sheet


def plan_sheets(result):
    """What a rank holds, the same by number of ranks, time, and what the check found."""
    check = plan_check_sheets(result.check) if result.check else []
    return [plan_memory_sheet(result), state_sheet(result.rows), plan_time_sheet(result), plan_sizes_sheet(result),
            *check]


def plan_memory_sheet(result):
    c, rows = result.conditions, []
    for row in result.rows:
        figures = [*row.held.values(), row.padding, c.activations, row.peak]
        name = row.base if row.bucket_mb is None else f"{row.base},\n{row.size} buckets"
        rows.append([name, *(f"{n_bytes / 1e9:.2f}" for n_bytes in figures), str(row.fits_from or NONE)])
    names = ("params", "grads", "main", "moments", "buffers", "padding", "activ.", "peak", "fits\nfrom d")
    return Sheet(
        f"What a rank of {c.world} holds, in GB: {c.model}, {c.parameters:,} parameters a rank",
        [("", ""), *((name, "counted") for name in names)], rows,
        ["GB: 10⁹ bytes, after a step, on rank 0. main: fp32 copies of 16-bit parameters. buffers: those that buckets "
         "travel in. padding: of all these, what is more than the formula: of padded, or of uneven, shards. "
         f"activ.: of a micro-batch of {c.batch_size} x {c.sequence_length}. peak: the most at one "
         f"moment of a step. fits from d: of the d below, the one from which on the peak is at most "
         f"{c.device_memory:g} GB; torch's allocator takes more, and stage 4 that accumulates in no_sync() whole "
         "gradients. Buckets are those that are best on most ranks."])


def plan_time_sheet(result):
    c = result.conditions
    tokens = c.batch_size * c.sequence_length * c.accumulate / c.tensor_parallel
    return Sheet(
        f"A step of {c.model} on {c.world * c.tensor_parallel} x {c.device}",
        [("", ""), ("ms a step\nin rings", "modelled"), ("in trees", "modelled"), ("exposed\nms", "modelled"),
         ("tokens/s\na device", "modelled"), ("GB at\nthe peak", "counted")],
        [[row.name, *(f"{ms * c.accumulate:,.0f}" for ms in (row.in_rings_ms, row.in_trees_ms)),
          f"{1e3 * row.step.exposed_seconds:,.0f}", f"{tokens / row.step.seconds:,.0f}", f"{row.peak / 1e9:.1f}"]
         for row in result.rows],
        [f"Assumed: {c.flops / 1e12:.0f} TFLOP/s, {c.efficiency:.0%} of what the maker states, "
         f"{c.memory_rate / 1e12:.2f} TB/s of memory, rings of {c.in_node / 1e9:.0f} GB/s in a node and "
         f"{c.between / 1e9:.0f} GB/s between nodes of {c.per_node}, {c.latency_in_node * 1e6:.0f} and "
         f"{c.latency_between * 1e6:.0f} µs a hop. Nobody is late, Python takes no time, tensor parallelism sends "
         f"nothing. {c.accumulate} micro-batch(es) a step. exposed: the device waits for messages.",
         "in trees: reduce-scatters and all-gathers pass nodes in hops that grow with log d, by NCCL's PAT "
         "(arXiv:2506.20252) at its best, with the bytes of a ring. NCCL takes it by itself with one GPU a node only. "
         f"Buckets, exposed and tokens: in {'trees' if c.trees else 'rings'}."])


def plan_sizes_sheet(result):
    return Sheet(
        f"Sizes of buckets: a micro-batch of {result.conditions.model} on {result.conditions.world} ranks",
        [("", ""), ("bucket", ""), ("ms in\nrings", "modelled"), ("ms in\ntrees", "modelled"),
         ("GB at\nthe peak", "counted")],
        [[size.base, f"{size.size}{'' if size.is_bucket else ' *'}", f"{size.in_rings_ms:,.0f}",
          f"{size.in_trees_ms:,.0f}", f"{size.peak / 1e9:.1f}"] for size in result.sizes],
        ["* not taken: two buffers take more than half of what whole gradients do, and stage 3 keeps those whole."])


def plan_check_sheets(check):
    found = {}  # (run, row without its size) -> ModelledRuns
    for run in check.two_hosts:
        base = run.base + ", accumulating" * (run.micro_batches is not None)
        found.setdefault((run.where, base), []).append(run)
    beyond = [f"{run.label} in {run.where}, {run.error:+.1%}" for runs in found.values() for run in runs
              if abs(run.error) > 0.1]
    (flops, _), (users_flops, users_line) = check.hardware
    return [
        Sheet("Two hosts: modelled beside measured steps, or micro-batches",
              [("", ""), ("", ""), ("rows", ""), ("from\nerror", "modelled"), ("to\nerror", "modelled")],
              [[where, row, f"{len(runs)}", *(f"{most(run.error for run in runs):+.1%}" for most in (min, max))]
               for (where, row), runs in found.items()],
              ["The rate of computing is calibrated on compute only. Assumed: 5 GB/s of memory, 200 µs a message, 1448 "
               "of 1514 bytes on the line are data, sending takes no time of the one core that computes, and a table "
               "without compute only computed as fast as the one with it.",
               f"Further off than 10 %: {'; '.join(beyond) or 'none'}. Where computing is the limit, the model leaves "
               "out what sending and Python take of the core that computes: compute + bytes shows a part of it."]),
        Sheet("LLaMA-13B on 8 x A100 a node: tokens/s a GPU",
              [("", ""), ("", ""), ("GPUs", ""), ("sequences\na step", ""), ("", "published"), ("", "modelled"),
               ("error", "modelled")],
              [[run.what, run.optimizer, f"{run.gpus}", f"{run.sequences}", f"{run.published:,.0f}",
                f"{run.modelled:,.0f}", f"{run.error:+.1%}"] for run in check.published],
              ["256 and 512 GPUs: Megatron-LLaMA's README; 128 GPUs: a user, issue 22 there. Calibrated: computing "
               f"on the first row, {flops:.0f} TFLOP/s; below, on the user's two rows, {users_flops:.0f} TFLOP/s and "
               f"{users_line:.0f} of 100 GB/s between nodes. none hidden: each message is waited for at once.",
               "Assumed: 2 GPUs share a layer, sequences of 2048, 2048 of them a step with 256 and 512 GPUs, 4 a "
               "micro-batch, the user's 2; overlapped: stage 4 with buckets of 400 MiB, and fp32 gradients sent after "
               "each micro-batch; distributed: stage 3, once a step."])]
