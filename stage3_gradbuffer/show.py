"""One step of stage 3, watched: what the buffer of every rank holds after each method, in the terminal and as SVG.

    python -m stage3_gradbuffer.show [--ranks 4] [--params 5,2,9] [--dtype bfloat16] [--grad-dtype float32] [--svg FILE]

The ranks are processes, the collectives are those of gloo (NCCL with a GPU for each rank), and the optimizer is the one
of this stage, untouched: a `WatchedBuffer` takes the place of its `GradBuffer`.
"""

import argparse
import json
import multiprocessing.forkserver
import signal
import sys
import textwrap
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
import torch.multiprocessing

from .buffer import GradBuffer, Holds
from .optimizer import DistributedOptimizer

START, LR = 10, 0.1  # every parameter starts at 10; element e of rank r has the gradient e + 10 r: easy to check by hand
TIMEOUT = timedelta(seconds=60)
LIMITS = {"ranks": 8, "elements": 64}  # more than that is no picture any more
COLOURS = ["#8ecae6", "#ffc857", "#8fd694", "#f4a3b5", "#c3aef2", "#f79d65", "#5fd3c6", "#d9c27e"]  # by owner


class WatchedBuffer(GradBuffer):
    """A GradBuffer that keeps a copy of what it holds after each method."""

    def __init__(self, params, grad_dtype, process_group):
        self.record = {}  # method -> (what the buffer holds, values; None where this rank has no such value)
        one_element = min(params[0].dtype.itemsize, grad_dtype.itemsize)  # bytes: no padding that isn't needed
        super().__init__(params, grad_dtype, process_group, alignment=one_element)

    def note(self, method, tensor):
        self.record[method] = self.holds.name, tensor.tolist()

    def note_main(self, method, tensors):
        """Main parameters and gradients are there for this rank's shard only."""
        values = [None] * len(self.flat)
        for r, tensor in zip(self.ranges, tensors):
            start = self.grad_shard.storage_offset() + r.offset
            values[start : start + len(tensor)] = tensor.tolist()
        self.record[method] = self.holds.name, values

    def collect_grads(self):
        super().collect_grads()
        self.note("collect_grads", self.flat)

    def reduce_scatter_grads(self):
        super().reduce_scatter_grads()
        self.note("reduce_scatter_grads", self.flat)

    def hand_out_main_grads(self):
        super().hand_out_main_grads()
        self.note_main("hand_out_main_grads", [main_param.grad for main_param in self.main_params])

    def take_main_params(self):
        self.note_main("optimizer.step", self.main_params)  # the inner one's, which has just returned
        super().take_main_params()
        self.note("take_main_params", self.flat_params)

    def all_gather_params(self):
        super().all_gather_params()
        self.note("all_gather_params", self.flat_params)

    def zero(self):
        super().zero()
        self.note("zero", self.flat)


def run_rank(rank, port, args):
    """One step on one rank; the record goes into the store, under "record" and the rank."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, even while it waits for another rank
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    on_gpu = dist.is_nccl_available() and torch.cuda.device_count() >= args.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=args.ranks,
                            timeout=TIMEOUT, device_id=device if on_gpu else None)

    params = [torch.nn.Parameter(torch.full((n,), START, dtype=args.dtype, device=device)) for n in args.params]
    with mock.patch(f"{__package__}.optimizer.GradBuffer", WatchedBuffer):
        optimizer = DistributedOptimizer(params, torch.optim.SGD, lr=LR, grad_dtype=args.grad_dtype)
    elements = torch.arange(1, sum(args.params) + 1, dtype=args.dtype, device=device)
    grads = (elements + 10 * rank).split(args.params)
    sum((param * grad).sum() for param, grad in zip(params, grads)).backward()
    optimizer.step()

    store.set(f"record {rank}", json.dumps(optimizer.buffers[0].record))
    dist.barrier()  # gloo aborts ranks that end while another talks to them
    dist.destroy_process_group()


def run_ranks(args):
    """-> the record of each rank. Whatever happens, no rank is left behind."""
    # One process imports torch and forks the ranks. It starts while Ctrl-C is ignored, and so goes on ignoring it.
    multiprocessing.set_forkserver_preload(["torch.distributed", "torch._dynamo"])  # which torch.optim imports late
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any that is free
    ranks = torch.multiprocessing.start_processes(run_rank, (store.port, args), args.ranks, join=False, daemon=True,
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
    kind: str  # "value", "garbage", "label" (padding too) or "absent"
    owner: int
    after_gap: bool  # a parameter or the padding begins here


class Block(NamedTuple):
    title: str
    caption: str
    rows: list  # of (label, cells)


def key_steps(args):
    """-> for each key step: method, whether all cells count and not this rank's shard only, title, caption."""
    d, in_16_bit, grads_in_16_bit = args.ranks, args.dtype.itemsize < 4, args.grad_dtype.itemsize < 4
    grads = [1 + 10 * rank for rank in range(d)]
    mean = sum(grads) / d
    after = f"{START} − {LR} × {mean:g} = {START - LR * mean:.4g}"
    half = "" if args.dtype == args.grad_dtype else " 16-bit values take the first half of the fp32 buffer's bytes."
    return [
        ("collect_grads", True, "All gradients", "Each rank's own, as backward left them. "
         "To check by hand: element e of rank r has the gradient e + 10 r."),
        ("reduce_scatter_grads", False, "Reduced shard", "Each rank receives the average of what it owns, and nothing "
         f"else: element 1 is ({' + '.join(map(str, grads))}) / {d} = {mean:g}. The grey rest is garbage."),
        ("hand_out_main_grads", False, "Main gradients", "What the inner optimizer reads: " +
         ("the shard, copied to a tensor of its own in fp32." if grads_in_16_bit else "views of the shard, no copy.")),
        ("optimizer.step", False, "Main parameters", "What the inner optimizer steps: " +
         ("fp32 tensors, kept for the shard only. " if in_16_bit else "views of the model's own tensors, no copy. ") +
         f"Plain SGD: element 1 is {after}."),
        ("take_main_params", False, "Shard of parameters", "They move into the same buffer, where the reduced "
         f"gradients were{', rounded to 16 bits' if in_16_bit else ''}.{half}"),
        ("all_gather_params", True, "All parameters", "Each rank has received the others' shards, in place. "
         "From here they are copied to the model's tensors."),
        ("zero", True, "Zeros", "Ready for the next backward pass to add to."),
    ]


def blocks_of(records, args):
    """The picture: a legend, and a block for each key step with a row for each rank."""
    numel, gaps = sum(args.params), set(accumulate(args.params))
    padded_numel = len(records[0]["zero"][1])
    owners = [i * args.ranks // padded_numel for i in range(padded_numel)]
    names = [f"p{index}" for index, n in enumerate(args.params) for _ in range(n)]
    names += ["pad"] * (padded_numel - numel)

    def row(texts, kinds):
        return [Cell(text, kind, owners[i], i in gaps) for i, (text, kind) in enumerate(zip(texts, kinds))]

    def kind(i, value, rank, all_count):
        if value is None:
            return "absent"
        return "label" if i >= numel else "value" if all_count or owners[i] == rank else "garbage"

    labels = ["label"] * padded_numel
    elements = [str(i + 1) if i < numel else "" for i in range(padded_numel)]
    blocks = [Block(f"{numel} gradients on {args.ranks} ranks, one step", "Colour: the rank that owns an element. "
                    f"│: a parameter begins. Parameters {name(args.dtype)}, gradients {name(args.grad_dtype)}.",
                    [("parameter", row(names, labels)), ("element", row(elements, labels)),
                     ("owner", row(map(str, owners), ["value"] * padded_numel))])]
    before = None
    for number, (method, all_count, title, caption) in enumerate(key_steps(args), 1):
        state = records[0][method][0]
        holds = f"still {state}" if state == before else f"{state}: {Holds[state].value}"
        rows = []
        for rank, record in enumerate(records):
            values = record[method][1]
            texts = ["·" if i >= numel and value == 0 else short(value) for i, value in enumerate(values)]
            rows.append((f"rank {rank}", row(texts, [kind(i, v, rank, all_count) for i, v in enumerate(values)])))
        blocks.append(Block(f"{number}  {title}", f"{method}() → the buffer holds {holds}\n{caption}", rows))
        before = state
    return blocks


def short(value):
    """At most four characters: three digits where they fit, "…" for what can only be garbage."""
    texts = [""] if value is None else [f"{value:.{digits}g}" for digits in (3, 2, 1)]
    return next((text for text in texts if len(text) <= 4), "…")


def name(dtype):
    return str(dtype).removeprefix("torch.")


def print_blocks(blocks, console):
    for title, caption, rows in blocks:
        console.print(f"\n[bold]{title}[/]\n{caption}")
        for label, cells in rows:
            line = rich.text.Text(f"{label:<10}")
            for cell in cells:
                colour = f"black on {COLOURS[cell.owner]}"
                style = {"value": colour, "garbage": "bright_black", "label": "", "absent": ""}[cell.kind]
                line.append("│" if cell.after_gap else " ", "" if cell.after_gap else style)
                line.append(f"{cell.text:>4}", style)
            console.print(line, soft_wrap=True)


def svg(blocks):
    """The same picture. Text around the cells is of a grey that can be read on white and on black."""
    width, height, left, gap = 44, 22, 84, 10  # pixels
    right = left + max(len(cells) * width + gap * sum(c.after_gap for c in cells) for _, cells in blocks[0].rows)
    out, y = [], 0

    def write(x, y, content, style):
        out.append(f'<text x="{x}" y="{y}" class="{style}">{escape(content)}</text>')

    for title, caption, rows in blocks:
        y += 30
        write(0, y, title, "title")
        for line in caption.splitlines():
            for piece in textwrap.wrap(line, right // 7):
                y += 18
                write(0, y, piece, "caption")
        y += 8
        for label, cells in rows:
            write(0, y + 15, label, "caption")
            x = left
            for cell in cells:
                if cell.after_gap:
                    out.append(f'<path d="M{x + gap / 2} {y}v{height}" class="gap"/>')
                    x += gap
                if cell.kind in ("value", "garbage"):
                    colour = COLOURS[cell.owner] if cell.kind == "value" else "#88888833"
                    out.append(f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" fill="{colour}"/>')
                write(x + width / 2 - 1, y + 15, cell.text, cell.kind)
                x += width
            y += height
    style = ("text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#808080;text-anchor:middle}"
             "text.title,text.caption{font-family:system-ui,sans-serif;font-size:13px;text-anchor:start}"
             "text.title{font-weight:bold;font-size:15px}text.value{fill:#111}.gap{stroke:#808080;stroke-width:2}")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {y + 4}" width="{right}" height="{y + 4}">'
    return "\n".join([head, f"<title>{escape(blocks[0].title)}</title><style>{style}</style>", *out, "</svg>\n"])
