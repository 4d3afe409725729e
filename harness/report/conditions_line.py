"""Under which conditions figures hold, in a line."""


def conditions_line(conditions):
    c = conditions
    shared = f" that share {c.gpus} GPU(s)" if 0 < c.gpus < c.ranks else ""
    hosts = f" on {c.hosts} hosts of {c.cores_per_host} core(s)" if c.cores_per_host else ""
    tcp = f", TCP {c.tcp}" if c.tcp else ""
    return " · ".join([
        c.machine, f"torch {c.torch}",
        f"{c.backend}, {c.ranks} rank(s) x {c.threads_per_rank} thread(s){shared}{hosts}{tcp}",
        f"{c.model}: {c.parameters:,} parameters, {c.dtype}, AdamW",
        f"a rank's batch: {c.batch_size} x {c.sequence_length} bytes",
        f"{c.rounds} rounds of {c.steps} steps", f"{c.date}{commit_of(c)}"])


def commit_of(conditions):
    """Of which code the figures are; older results don't say."""
    return f" · commit {conditions.commit}" if conditions.commit else ""
