"""One step of a row, as rank x time: what computes when, and what travels when. Recorded from outside, no stage knows.

    python -m harness.measure.timeline [--rows "stage 4"] [--ranks 2] [--model tiny]        # or: make timeline STAGE=4
    python -m harness.measure.timeline --rows all    # ddp and the four stages on one axis, or: make timeline STAGE=all

prints it, and writes results/timeline.svg, and results/timeline.json for https://ui.perfetto.dev and chrome://tracing.

Computing is what the dispatcher runs: a dispatch mode notes when each operator starts and ends, and where nothing runs
for longer than GAP_S the rank waits. What travels is the ledger's. Memory is what is alive after each operator, of all
that was made since before the model was built, counted as in the bench (harness/measure/memory.py).
"""

import argparse
import functools
import gc
import json
import sys
import time
from contextlib import contextmanager
from html import escape
from pathlib import Path

import torch
import torch.distributed as dist

from harness.measure.ledger import Ledger
from harness.measure.measure import WARMUP_STEPS, Settings, adamw, attempt, make_batches, make_model
from harness.measure.memory import Memory
from harness.rows import buckets, peers
from harness.run import cli
from harness.run.launch import WorkerError, Workers
from harness.train import workload

fail = functools.partial(cli.fail, "timeline")

GAP_S = 0.0005  # Python needs this long between two operators; whoever waits for another rank, longer
RECORDED_STEPS = 6  # the first is there for what it leaves under way
MEMORY_PARTS = 200  # of a step; of each the most that is alive: a picture has no more room, and a peak is never lost


class Recorder(Ledger):
    """A ledger that also writes down when operators ran, in which phase of the step, and how much was alive.

    Args:
        memory: a `harness.measure.memory.Memory` that has been entered.

    Attributes:
        busy: [[start, end], …] in seconds of time.perf_counter, in order.
        phases: [(name, start, end), …].
        live: [(time, bytes), …]: what is alive from that time on.
    """

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.busy, self.phases, self.live = [], [], [(time.perf_counter(), memory.live)]

    @contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        self.phases.append((name, start, time.perf_counter()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        start = time.perf_counter()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        end = time.perf_counter()
        if (live := self.memory.live) != self.live[-1][1]:
            self.live.append((end, live))
        if function.namespace in ("c10d", "_c10d_functional"):
            return result
        if self.busy and start - self.busy[-1][1] < GAP_S:
            self.busy[-1][1] = end
        else:
            self.busy.append([start, end])
        return result


def record(rank, settings, name):
    """Record steps of a row, with no pause between them -> the one of median length, on this rank: see `one_step`."""
    if rank.device.type != "cpu":
        raise RuntimeError("on a GPU this would show when kernels are launched, not when they run: use torch.profiler")
    row, batches = peers.find(name), make_batches(settings, rank)[:WARMUP_STEPS]
    gc.collect()
    with Memory(rank.device) as memory:
        training = row.build(make_model(settings, rank, row.dtype), adamw(settings))
        for batch in batches:
            training.step(batch)
        training.finish()
        dist.barrier()
        with Recorder(memory) as recorder:
            for step in range(RECORDED_STEPS):
                tokens, targets = batches[step % WARMUP_STEPS]  # `memory` knows them by now
                with recorder.phase("forward"):
                    loss = training.forward(tokens, targets)
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("step"):
                    training.update()
                    training.zero_grad()
            training.finish()
        return one_step(recorder, median_step(recorder))


def median_step(recorder):
    """The number of the recorded step that is of median length, the first one aside. Collective, the same on all ranks.

    A step is as long as on the slowest rank. In a single one this machine may have been busy with something else.
    """
    spans = [span_of(recorder, number) for number in range(1, RECORDED_STEPS)]
    lengths = torch.tensor([end - start for start, end in spans], dtype=torch.float64)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    return 1 + lengths.argsort()[len(lengths) // 2].item()


def span_of(recorder, number):
    """From the start of a step's forward until the next one's could start, in seconds of time.perf_counter()."""
    forward, _, step = recorder.phases[3 * number : 3 * number + 3]
    return forward[1], step[2]


def record_rows(workers, settings, rows, progress=lambda text: None):
    """Records every row of a result of measure.measure that has no error: row["timeline"], see `one_step`, by rank."""
    for row in rows:
        if "error" not in row:
            progress(f"timeline: {row['name']}")
            attempt(row, lambda: row.update(timeline=workers.run(record, settings, row["name"])))


def keep_exposed_only(rows):
    """Of the recorded steps, what the tables show."""
    for row in (row for row in rows if "timeline" in row):
        row["timeline"] = [{"exposed_seconds": step["exposed_seconds"]} for step in row["timeline"]]


def to_draw(results):
    """Of results at several rates, the one to be drawn: at the lowest there is most to see. None: no step was kept."""
    drawable = [result for result in results
                if any("busy" in step for row in result["rows"] for step in row.get("timeline", []))]
    return min(drawable, key=lambda result: result["conditions"]["bits_per_second"], default=None)


def one_step(recorder, number):
    """One of the recorded steps, not the first, from the start of its forward until the next one's could start.

    What travels across that border (parameters that the next forward waits for) is shown where it is seen: at the
    start, that of the step before.
    """
    start, end = span_of(recorder, number)
    inside = [entry for entry in recorder.entries if entry.completed_at > start and entry.launched_at < end]
    spans = [(max(entry.launched_at, start), min(entry.completed_at, end)) for entry in inside]
    busy = [(max(a, start), min(b, end)) for a, b in recorder.busy if b > start and a < end]
    def since(*times):
        return [round(moment - start, 6) for moment in times]
    return {
        "seconds": since(end)[0],
        "phases": [(name, *since(a, b)) for name, a, b in recorder.phases if start <= a < end],
        "busy": [since(a, b) for a, b in busy],
        "communication": [{"kind": entry.kind, "bytes": entry.size, "start": since(entry.launched_at)[0],
                           "end": since(entry.completed_at)[0]} for entry in inside],
        "exposed_seconds": round(length(union(spans)) - length(overlap(union(spans), busy)), 6),
        "memory": most_alive(recorder.live, start, end),
    }


def most_alive(live, start, end):
    """`live`: [(time, bytes), …] -> the most bytes that were alive in each of MEMORY_PARTS equal parts of a step."""
    parts = [0] * MEMORY_PARTS
    for (since, n_bytes), (until, _) in zip(live, [*live[1:], (end, 0)]):
        if since < end and until > start:
            first, last = (int((moment - start) / (end - start) * MEMORY_PARTS) for moment in (since, until))
            for i in range(max(first, 0), min(last + 1, MEMORY_PARTS)):
                parts[i] = max(parts[i], n_bytes)
    return parts


def union(spans):
    """Spans that may overlap -> the same time, in spans that don't, in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(ones, others):
    """The time that lies in both; each a list of disjoint spans."""
    return [(max(a, c), min(b, d)) for a, b in ones for c, d in others if max(a, c) < min(b, d)]


def length(spans):
    return sum(end - start for start, end in spans)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing. A lane is (name, spans): spans are (start, end, what), in seconds from the start of the step.

GRADIENTS = ("all_reduce", "reduce_scatter", "reduce", "send", "recv", "all_to_all")
PARAMETERS = ("all_gather", "broadcast")


def lanes(step):
    """A recorded step -> [("computes", spans), ("gradients", spans), ("parameters", spans)]."""
    computes = [(start, end, name) for name, *phase in step["phases"] for start, end in overlap([phase], step["busy"])]
    return [("computes", computes), *((name, arrivals(step, kinds))
                                      for name, kinds in (("gradients", GRADIENTS), ("parameters", PARAMETERS)))]


def arrivals(step, kinds):
    """One span for each message that arrives: from its launch, or from when the one before it had arrived."""
    spans, before = [], 0.0
    for message in sorted(step["communication"], key=lambda message: message["end"]):
        if message["kind"] in kinds:
            start = max(message["start"], before)
            spans.append((start, max(message["end"], start), "gradients" if kinds is GRADIENTS else "parameters"))
            before = max(message["end"], start)
    return [span for span in spans if span[0] < step["seconds"]]


def peak(rows):
    """The most bytes that any row held: where the memory lanes end."""
    return max(max(step.get("memory", [0])) for _, step in rows)


def megabytes(step):
    return f"{max(step['memory']) / 1e6:.0f} MB"


LETTERS = {"forward": "F", "backward": "B", "step": "S", "gradients": "▒", "parameters": "▓"}
HEIGHTS = " ▁▂▃▄▅▆▇█"


def text(rows, width=80):
    """`rows`: [(name, recorded step), …], on one axis -> text for the terminal; a letter: most of its moment."""
    longest, most_bytes = max(step["seconds"] for _, step in rows), peak(rows)
    out = []
    for name, step in rows:
        out.append(f"{name}: {step['seconds'] * 1000:.0f} ms, {step['exposed_seconds'] * 1000:.0f} ms of communication "
                   "during which nothing computes")
        for lane, spans in lanes(step):
            cells = []
            for i in range(width):
                moment = [(i * longest / width, (i + 1) * longest / width)]
                shares = {}
                for start, end, what in spans:
                    shares[what] = shares.get(what, 0) + length(overlap(moment, [(start, end)]))
                most = max(shares, key=shares.get, default=None)
                cells.append(LETTERS[most] if most and shares[most] > longest / width / 3 else "·")
            out.append(f"{lane:>10} {''.join(cells)}".replace("·" * width, "·"))
        if "memory" in step:
            cells = round(width * step["seconds"] / longest)
            parts = [step["memory"][i * MEMORY_PARTS // cells:(i + 1) * MEMORY_PARTS // cells] for i in range(cells)]
            heights = "".join(HEIGHTS[round(max(part) / most_bytes * (len(HEIGHTS) - 1))] for part in parts)
            out.append(f"{'memory':>10} {heights} ≤ {megabytes(step)}")
    return "\n".join([*out, f"{'':>10} 0 ms{longest * 1000:>{width - 7}.0f} ms"])


def svg(rows, title):
    """The same picture: one band a row, a lane each for what computes and what travels, and memory below them.

    Readable on light and dark.
    """
    left, width, lane_height, curve_height, band = 96, 880, 14, 26, 110  # pixels
    longest, most_bytes = max(step["seconds"] for _, step in rows), peak(rows)
    out, y = [f'<text y="16" class="title">{escape(title)}</text>'], 28
    for name, step in rows:
        waits = f"{step['seconds'] * 1000:.0f} ms, {step['exposed_seconds'] * 1000:.0f} ms of it communication during "
        out.append(f'<text y="{y + 14}"><tspan class="title">{escape(name)}</tspan>: {waits}which nothing computes'
                   "</text>")
        for i, (lane, spans) in enumerate(lanes(step)):
            top = y + 20 + i * (lane_height + 2)
            out.append(f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{lane}</text>')
            out.append(f'<rect x="{left}" y="{top}" width="{width * step["seconds"] / longest:.1f}" '
                       f'height="{lane_height}" class="nothing"/>')
            for start, end, what in spans:
                start, end = max(start, 0), min(end, step["seconds"])
                x, wide = left + width * start / longest, width * (end - start) / longest
                out.append(f'<rect x="{x:.1f}" y="{top}" width="{max(wide - 0.4, 0.3):.1f}" height="{lane_height}" '
                           f'class="{what}"/>')
        if "memory" in step:
            bottom, wide = y + 20 + 3 * (lane_height + 2) + curve_height, width * step["seconds"] / longest
            heights = [f"{left + wide * (i + side) / MEMORY_PARTS:.1f},{bottom - curve_height * part / most_bytes:.1f}"
                       for i, part in enumerate(step["memory"]) for side in (0, 1)]
            points = " ".join([f"{left},{bottom}", *heights, f"{left + wide:.1f},{bottom}"])
            out.append(f'<text x="{left - 8}" y="{bottom - 14}" text-anchor="end">memory</text>'
                       f'<text x="{left - 8}" y="{bottom - 1}" text-anchor="end">≤ {megabytes(step)}</text>'
                       f'<polygon points="{points}" class="memory"/>')
        y += band
    step_ms = buckets.round_step(1000 * longest)
    for tick in range(int(1000 * longest / step_ms) + 1):
        x = left + width * tick * step_ms / (1000 * longest)
        anchor = "start" if tick == 0 else "end" if x > left + width - 20 else "middle"
        out.append(f'<text x="{x:.0f}" y="{y + 12}" text-anchor="{anchor}" class="tick">{tick * step_ms:g} ms</text>')
    x = left
    for what in (*LETTERS, "memory"):
        out.append(f'<rect x="{x}" y="{y + 24}" width="12" height="12" class="{what}"/>'
                   f'<text x="{x + 17}" y="{y + 34}">{what}</text>')
        x += 110
    style = (".title{font-weight:bold} text{font:12px sans-serif;fill:#777} .nothing{fill:#8883} "
             ".forward{fill:#4a90d9} .backward{fill:#2a5f9e} .step{fill:#d9822b} .gradients{fill:#3a9d5d} "
             ".parameters{fill:#b04a9d} .memory{fill:#c9a227}")
    size = f'viewBox="0 0 {left + width + 8} {y + 44}" width="{left + width + 8}" height="{y + 44}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>{escape(title)}</title>'
                      f"<style>{style}</style>", *out, "</svg>\n"])


def on_two_hosts(result):
    """The result of harness.measure.network -> (rows, title) for `text` and `svg`: the ladder, on rank 0."""
    c = result["conditions"]
    rows = [(row["name"], row["timeline"][0]) for row in result["rows"] if row["name"] in peers.LADDER
            and "timeline" in row]
    return rows, (f"One step on rank 0 of {c['hosts']} hosts, {c['rate']}: {c['model']}, {c['batch_size']} x "
                  f"{c['sequence_length']}")


def picture(results):
    """Of results of make network at several rates -> that one's step which is to be drawn, as SVG; "" for none."""
    rows, title = on_two_hosts(drawn) if (drawn := to_draw(results)) else ([], "")
    return svg(rows, title) if rows else ""


def trace(rows):
    """The same as events of Chrome's trace format: a process a row, a thread a lane. Times in microseconds."""
    events = []
    for process, (name, step) in enumerate(rows):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        messages = [(message["start"], message["end"], f"{message['kind']} {message['bytes']} bytes", message["kind"])
                    for message in step["communication"]]
        phases = [(start, end, phase, "phases") for phase, start, end in step["phases"]]
        computes = [(start, end, "computes", "computes") for start, end in step["busy"]]
        events += [{"ph": "C", "name": "memory", "pid": process, "ts": i / MEMORY_PARTS * step["seconds"] * 1e6,
                    "args": {"bytes": n_bytes}} for i, n_bytes in enumerate(step.get("memory", []))]
        threads = {}
        for start, end, what, lane in phases + computes + messages:
            thread = threads.setdefault(lane, len(threads))
            events.append({"ph": "X", "name": what, "pid": process, "tid": thread, "ts": start * 1e6,
                           "dur": (end - start) * 1e6})
        events += [{"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}}
                   for lane, thread in threads.items()]
    return {"traceEvents": events}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, and ddp; all: ddp and the four "
        "stages, on rank 0")
    add("--ranks", type=int, default=2, help="processes on this machine (default 2)")
    add("--model", default="tiny", help="see bench.py (default tiny)")
    add("--batch-size", type=int, default=8, help="sequences per rank (default 8)")
    add("--sequence-length", type=int, default=128, help="bytes per sequence (default 128)")
    add("--out", type=Path, default=Path("results/timeline.svg"), help="of the picture; the trace is beside it")
    args = parser.parse_args()
    cli.check_workload(args, ("ranks",), workload.MODELS, fail)
    cli.check_beside("--out", args.out, ".json", fail)
    if args.out.suffix != ".svg":
        fail(f"--out {args.out}: the picture is an SVG: let its name end in .svg")
    every = [row.name for row in peers.ROWS if row.dtype == "float32"]
    names = [name for name in every if args.rows in name or name == peers.REFERENCE]
    if args.rows == "all":
        return args, peers.LADDER
    if not any(args.rows in name for name in names):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(every)}")
    return args, names


def main():
    args, names = parse()
    settings = Settings(args.model, args.batch_size, args.sequence_length, steps=3)
    n_drawn = 1 if args.rows == "all" else args.ranks
    with Workers(args.ranks) as workers:
        rows = [(f"{name}, rank {rank}", step) for name in names
                for rank, step in enumerate(workers.run(record, settings, name)[:n_drawn])]
    title = f"One step, {args.ranks} ranks on one machine: {args.model}, {args.batch_size} x {args.sequence_length}"
    try:
        cli.write("--out", args.out, svg(rows, title), fail)
        cli.write("--out", args.out.with_suffix(".json"), json.dumps(trace(rows)), fail)
    finally:  # see bench.py
        print(text(rows))
    print(f"written to {args.out} and {args.out.with_suffix('.json')}")


if __name__ == "__main__":
    try:
        main()
    except WorkerError as error:
        sys.exit(f"timeline: {error}")
