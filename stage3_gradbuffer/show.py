"""One step of stage 3, watched: what the buffer of every rank holds after each method, in the terminal and as SVG.

    python -m stage3_gradbuffer.show [--ranks 4] [--params 5,2,9] [--dtype bfloat16] [--grad-dtype float32] [--svg FILE]

The ranks are processes, the collectives are those of gloo (NCCL with a GPU for each rank), and the optimizer is the
core of this stage, untouched: a `WatchedBuffer` takes the place of its `GradBuffer`.
"""

import argparse
import json
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from xml.sax.saxutils import escape

import rich.console
import rich.text
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .buffer import GradBuffer
from .optimizer import ShardedOptimizer

START, LR = 10, 0.1  # every parameter starts at 10, and element e of rank r has the gradient e + 10 r
TIMEOUT = timedelta(seconds=60)
MAX_RANKS, MAX_ELEMENTS = 8, 64  # more is no picture any more
COLOURS = ["#8ecae6", "#ffc857", "#8fd694", "#f4a3b5", "#c3aef2", "#f79d65", "#5fd3c6", "#d9c27e"]  # by owner


class WatchedBuffer(GradBuffer):
    """A GradBuffer that keeps a copy of what it holds after each method."""

    def __init__(self, params, grad_dtype, process_group):
        self.record = {}  # method -> (what the buffer holds, values; None where this rank has no such value)
        one_element = min(params[0].dtype.itemsize, grad_dtype.itemsize)  # bytes: no padding that isn't needed
        with mock.patch(f"{__package__}.buffer.ALIGNMENT", one_element):
            super().__init__(params, grad_dtype, process_group)

    def note(self, method, tensor):
        self.record[method] = self.holds.name, tensor.tolist()

    def note_main(self, method, tensors):
        """Main parameters and gradients are there for this rank's shard only."""
        values = [None] * len(self.flat)
        for r, tensor in zip(self.ranges, tensors):
            start = self.grad_shard.storage_offset() + r.offset
            values[start : start + len(tensor)] = tensor.tolist()
        self.record[method] = self.holds.name, values

    def reduce_scatter_grads(self):
        self.note("backward()", self.flat)
        super().reduce_scatter_grads()
        self.note("reduce_scatter_grads()", self.flat)
        self.note_main("main_grads", self.main_grads)

    def take_main_params(self):
        self.note_main("optimizer.step()", self.main_params)  # the inner one's, which has just returned
        super().take_main_params()
        self.note("take_main_params()", self.flat_params)

    def all_gather_params(self):
        super().all_gather_params()
        self.note("all_gather_params()", self.flat_params)

    def zero(self):
        super().zero()
        self.note("zero()", self.flat)


def run_rank(rank, port, args):
    """One step on one rank; the record goes into the store, under "record" and the rank."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    on_gpu = dist.is_nccl_available() and torch.cuda.device_count() >= args.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=args.ranks,
                            timeout=TIMEOUT, device_id=device if on_gpu else None)

    params = [torch.nn.Parameter(torch.full((n,), START, dtype=args.dtype, device=device)) for n in args.params]
    with mock.patch.object(ShardedOptimizer, "buffer_class", WatchedBuffer):
        optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=LR, grad_dtype=args.grad_dtype)
    elements = torch.arange(1, sum(args.params) + 1, dtype=args.dtype, device=device)
    grads = (elements + 10 * rank).split(args.params)
    sum((param * grad).sum() for param, grad in zip(params, grads)).backward()
    optimizer.step()

    store.set(f"record {rank}", json.dumps(optimizer.buffers[0].record))
    dist.barrier()  # gloo aborts ranks that end while another talks to them
    dist.destroy_process_group()


def end_with_parent():
    """Runs in a thread of each rank, which may be waiting for one that was never started."""
    multiprocessing.parent_process().join()
    os._exit(1)


def run_ranks(args):
    """-> the record of each rank. Whatever happens, no rank is left behind."""
    # One process imports torch, and forks the ranks. They leave Ctrl-C to this one, which ignores it as they start.
    multiprocessing.set_forkserver_preload(["torch.distributed", "torch._dynamo"])  # which torch.optim imports late
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any that is free
    ranks = mp.start_processes(run_rank, (store.port, args), args.ranks, join=False, daemon=True,
                               start_method="forkserver")
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    try:
        while not ranks.join(timeout=max(0, deadline - time.monotonic())):  # raises when a rank fails
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ranks have not finished after {TIMEOUT.total_seconds():.0f} seconds")
        return [json.loads(store.get(f"record {rank}")) for rank in range(args.ranks)]
    finally:
        for process in ranks.processes:
            process.kill()


class Cell(NamedTuple):
    text: str
    kind: str  # "value" and "garbage" are filled, "plain" is not
    owner: int
    after_gap: bool  # a parameter or the padding begins here


def key_steps(args):
    """-> for each: method, whether all that it leaves counts and not the rank's shard only, title, explanation."""
    d, in_16_bit, grads_in_16_bit = args.ranks, args.dtype.itemsize < 4, args.grad_dtype.itemsize < 4
    grads = [1 + 10 * rank for rank in range(d)]
    mean = sum(grads) / d
    return [
        ("backward()", True, "All gradients",
         "Each rank's own, as backward left them: element e of rank r has the gradient e + 10 r."),
        ("reduce_scatter_grads()", False, "Reduced shard",
         f"The average of what a rank owns: ({' + '.join(map(str, grads))}) / {d} = {mean:g}. Grey is garbage."),
        ("main_grads", False, "Main gradients", "What the inner optimizer reads: " +
         ("the shard, copied to fp32 tensors of its size." if grads_in_16_bit else "views of the shard, no copy.")),
        ("optimizer.step()", False, "Main parameters",
         f"What it stepped: {'fp32 tensors, kept for the shard only' if in_16_bit else 'views of the model, no copy'}. "
         f"Plain SGD: {START} − {LR} × {mean:g} = {START - LR * mean:.4g}."),
        ("take_main_params()", False, "Shard of parameters", "They take the place of the reduced gradients" +
         (", rounded to 16 bits" if in_16_bit else "") +
         (", in the first half of the bytes." if in_16_bit and not grads_in_16_bit else ".")),
        ("all_gather_params()", True, "All parameters",
         "Each rank has received the shards of the others. They are copied to the model from here."),
        ("zero()", True, "Zeros", "Ready for the next backward pass to add to."),
    ]


def draw(records, args):
    """-> the picture: a legend and the key steps, each as (title, explanation, rows); a row as (label, cells)."""
    numel, padded_numel = sum(args.params), len(records[0]["zero()"][1])
    starts = [i in accumulate(args.params) for i in range(padded_numel)]
    owners = [i * args.ranks // padded_numel for i in range(padded_numel)]
    names = [f"p{index}" for index, n in enumerate(args.params) for _ in range(n)] + ["pad"] * (padded_numel - numel)

    def row(label, texts, kinds):
        return label, [Cell(*cell) for cell in zip(texts, kinds, owners, starts)]

    def row_of_values(rank, values, all_count):
        texts = ["·" if i >= numel and value == 0 else short(value) for i, value in enumerate(values)]
        kinds = ["plain" if i >= numel or value is None else "value" if all_count or owners[i] == rank else "garbage"
                 for i, value in enumerate(values)]
        return row(f"rank {rank}", texts, kinds)

    plain = ["plain"] * padded_numel
    elements = [str(i + 1) if i < numel else "" for i in range(padded_numel)]
    legend = [row("parameter", names, plain), row("element", elements, plain),
              row("owner", map(str, owners), ["value"] * padded_numel)]
    dtypes = f"{args.dtype} parameters, {args.grad_dtype} gradients".replace("torch.", "")
    explanation = f"{dtypes}. Colour: the rank that owns it. After →: what the buffer holds."
    blocks = [(f"One step of {numel} parameters on {args.ranks} ranks", explanation, legend)]
    for number, (method, all_count, title, explanation) in enumerate(key_steps(args), 1):
        state = records[0][method][0]
        rows = [row_of_values(rank, record[method][1], all_count) for rank, record in enumerate(records)]
        blocks.append((f"{number}. {title}: {method} → Holds.{state}", explanation, rows))
    return blocks


def short(value):
    """At most four characters: three digits where they fit, "…" for what can only be garbage."""
    texts = [""] if value is None else [f"{value:.{digits}g}" for digits in (3, 2, 1)]
    return next((text for text in texts if len(text) <= 4), "…")


def print_blocks(blocks):
    console = rich.console.Console(highlight=False)
    for title, explanation, rows in blocks:
        console.print(f"[bold]{title}[/]\n{explanation}", soft_wrap=True)
        for label, cells in rows:
            line = rich.text.Text(f"{label:<10}")
            for cell in cells:
                style = {"value": f"black on {COLOURS[cell.owner]}", "garbage": "grey50", "plain": ""}[cell.kind]
                line.append("│" if cell.after_gap else " ", "" if cell.after_gap else style)
                line.append(f"{cell.text:>4}", style)
            console.print(line, soft_wrap=True)
        console.print()


def svg(blocks):
    """The same picture. Text that is not in a filled cell has a grey that can be read on white and on black."""
    width, height, left, gap = 44, 22, 84, 10  # pixels
    out, y = [], 0
    for title, explanation, rows in blocks:
        out.append(f'<text y="{y + 18}" class="title">{escape(title)}</text>')
        out.append(f'<text y="{y + 38}" class="words">{escape(explanation)}</text>')
        y += 48
        for label, cells in rows:
            out.append(f'<text y="{y + 15}" class="words">{label}</text>')
            x = left
            for cell in cells:
                if cell.after_gap:
                    out.append(f'<path d="M{x + gap / 2 - 1} {y}v{height}" class="gap"/>')
                    x += gap
                if cell.kind != "plain":
                    colour = COLOURS[cell.owner] if cell.kind == "value" else "#88888833"
                    out.append(f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" fill="{colour}"/>')
                out.append(f'<text x="{x + width / 2 - 1}" y="{y + 15}" class="{cell.kind}">{cell.text}</text>')
                x += width
            y += height
        y += 20
    style = ("text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#808080;text-anchor:middle}"
             "text.title,text.words{font:13px system-ui,sans-serif;text-anchor:start}text.title{font-weight:bold}"
             "text.value{fill:#111}.gap{stroke:#808080;stroke-width:2}")
    size = f'width="{max(x, 720)}" height="{y}" viewBox="0 0 {max(x, 720)} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>{blocks[0][0]}</title><style>{style}</style>'
    return "\n".join([head, *out, "</svg>\n"])


def parse_args():
    """A mistake is one line, and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"show.py: error: {message} (--help shows all options)\n")
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes (default 4)")
    add("--params", default="5,2,9", help="elements of each parameter (default 5,2,9)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the parameters")
    add("--grad-dtype", choices=["float32"], help="of the gradients (default: that of the parameters)")
    add("--svg", type=Path, default="results/show.svg", help="where the picture goes (default results/show.svg)")
    args = parser.parse_args()
    args.dtype, args.grad_dtype = getattr(torch, args.dtype), getattr(torch, args.grad_dtype or args.dtype)
    sizes = [int(size) if size.strip().isdecimal() else 0 for size in args.params.split(",")]
    if not 1 <= args.ranks <= MAX_RANKS:
        parser.error(f"--ranks must be from 1 to {MAX_RANKS}, not {args.ranks}")
    if min(sizes) < 1 or sum(sizes) > MAX_ELEMENTS:
        parser.error(f"--params must be like 5,2,9 and at most {MAX_ELEMENTS} in all, not {args.params!r}")
    args.params = sizes
    try:
        args.svg.parent.mkdir(parents=True, exist_ok=True)
        args.svg.open("a").close()
    except OSError as error:
        parser.error(f"--svg: {error}")
    return args


def main():
    args = parse_args()
    blocks = draw(run_ranks(args), args)
    args.svg.write_text(svg(blocks), encoding="utf-8")  # before it is shown: see bench.py
    print_blocks(blocks)
    print(f"saved as {args.svg}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (OSError, RuntimeError, mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"show.py: {str(error).strip()}")
