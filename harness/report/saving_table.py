"""The tables of make saving."""

import statistics

from harness.report.conditions_line import commit_of
from harness.report.sheet import NONE, Sheet


def saving_sheet(result):
    c, rows = result.conditions, []
    for row in result.rows:
        rates = [c.bytes / seconds / 1e9 for seconds in row.rounds_s]
        share = f"{result.row(row.beside).median_s / row.median_s:.2f}" if row.beside else NONE
        rows.append([row.name, f"{row.median_s:.2f}", f"{statistics.median(rates):.2f}",
                     f"{min(rates):.2f}–{max(rates):.2f}", share])
    held, behind = statistics.median(result.held_up_ms), statistics.median(result.behind_ms)
    return Sheet(
        f"Saving and loading {c.bytes / 1e9:.1f} GB on {c.ranks} ranks",
        [("", ""), ("seconds", "measured"), ("GB/s", "measured"), ("from–to", "measured"),
         ("of the\ndisk's rate", "measured")], rows,
        ["Disk: each rank writes its bytes into a file, 1 MiB at a time, and calls fsync, or reads them, all at once. "
         "torch.save: the same tensors of each rank, with fsync. checkpoint.save makes a checksum, and tells the disk "
         "to begin every 16 MiB; checkpoint.load compares the checksum, then reads again. In each round another row "
         "writes first. Files are read after the system has been asked to forget them. The slowest rank counts.",
         f"An asynchronous save holds up the step that calls it for {held:,.0f} ms, in which it copies; a step without "
         f"one takes {c.step_ms:,.0f} ms. Steps that ran while it was written, "
         f"{statistics.median(result.n_behind):.0f} a round, took {behind:,.0f} ms more than as many "
         "without: the cores are shared.",
         f"{c.machine} · torch {c.torch} · stage 4, AdamW, fp32 · {c.rounds} rounds, all rows in turn, medians · "
         f"{c.date}{commit_of(c)}"])
