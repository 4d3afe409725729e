"""The page that plays: the idea, replicated training, the four stages, and each chapter's "bug that you will write".

It is one file that needs nothing else.
"""

import base64
import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.ranks.workers import Workers

from . import beats, frames, layout, picture, replicated, scenes
from .record import Edit, Program, record_rank

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "watch.html"
# 16 elements, so that a cell has room for its value.
OWNED = (2, 2, 3, 3, 3, 3)  # every rank owns some tensors, and rank 0 two
FILLED = (2, 2, 4, 4, 4)  # four buckets, of one tensor or two, that need no padding
WHOLE = Program(replicated.__name__)
ONE = Program(STAGE_1, params=OWNED)
TWO = Program(STAGE_2, params=OWNED)
THREE = Program(STAGE_3)
FOUR = Program(STAGE_4, params=FILLED, bucket_bytes=16)
TWICE = "2·4Ψ·(d-1)/d"
THRICE = "3·4Ψ·(d-1)/d"
SHARDED = "(8 + 8/d)Ψ"


@dataclass(frozen=True)
class Shown:
    """A program of the page, with formulas of its counters: what a rank sends in a step, and holds after the step."""
    id: str
    short: str
    title: str
    program: Program
    sent: str = ""  # Ψ: elements of the model, d: ranks; with AdamW, before zero_grad
    held: str = ""
    held_bytes: int = 0
    right: Program | None = None  # what it is compared with
    is_bug: bool = False
    tab: str = ""  # the id of the tab that leads to it, if it has none


def bug(id, short, title, program, before, after):
    edited = replace(program, edit=Edit("optimizer.py", before, after))
    return Shown(id, short, title, edited, right=program, is_bug=True)


def idea(d, id, held_bytes, tab=""):
    title = "An all-reduce in two halves, with the update between them."
    right = replace(WHOLE, ranks=d)
    return Shown(id, "idea", title, replace(THREE, ranks=d), TWICE, SHARDED, held_bytes, right=right, tab=tab)


SHOWN = (
    idea(4, "idea", 160),
    Shown("0", "0 replicated", "Replicated training: nothing is sharded.", WHOLE, TWICE, "16Ψ", 256),
    Shown("1", "1 broadcast", "Stage 1, naive broadcast: each parameter has one owner.", ONE, THRICE, SHARDED, 160),
    Shown("2", "2 all-gather", "Stage 2, all-gather: one collective brings all parameters back.", TWO,
          f"{THRICE} + padding", SHARDED, 160),
    Shown("3", "3 grad buffer", "Stage 3, grad buffer: gradients and parameters take turns in one flat buffer.", THREE,
          TWICE, SHARDED, 160),
    Shown("4", "4 overlap", "Stage 4, overlap: buckets leave during the backward pass, parameters arrive during the "
          "next forward pass.", FOUR, TWICE, "(4 + 12/d)Ψ + two buckets", 144),
    bug("1-copy", "1: not copied back", "Bug of stage 1: what was broadcast isn't copied back.", ONE,
        "                copy_all(shard, cut_like(flat, shard))\n", ""),
    bug("2-order", "2: another order", "Bug of stage 2: a shard is packed in another order than it is unpacked in.",
        TWO, "mine = self.shards[self.rank]\n",
        'mine = [param for group in self.optimizer.param_groups for param in group["params"]]\n'),
    bug("3-none", "3: gradients set to None", "Bug of stage 3: zero_grad is left to torch.", replace(THREE, steps=2),
        "def zero_grad(", "def unused("),
    bug("3-zero", "3: not zeroed", "Bug of stage 3: step doesn't zero the buffer.",
        replace(THREE, steps=2, loop="train_without_zero_grad"), "        self.zero_grad()\n", ""),
    bug("4-queue", "4: buckets leave as they come", "Bug of stage 4: no queue, each bucket leaves when it is full.",
        replace(FOUR, params=(4, 4, 4), is_rank_1_reversed=True),
        "        self.bucket_of[param].ready.add(param)\n        self.send_full_buckets()\n",
        "        bucket = self.bucket_of[param]\n        bucket.ready.add(param)\n"
        "        if bucket.is_full():\n            self.send_grads(bucket)\n"),
    bug("4-wait", "4: waits for another bucket", "Bug of stage 4: a layer waits for another bucket than its own.",
        FOUR, "self.bucket_of[param].finish_param_sync()", "self.buckets[-1].finish_param_sync()"),
    idea(2, "idea-2", 192, tab="idea"),
    idea(8, "idea-8", 144, tab="idea"),
)


def recorded(program):
    """Return the recording of a program."""
    with Workers(program.ranks, timeout_s=600) as workers:
        return frames.recording(workers.run(record_rank, program), program)


def with_places(recording):
    """Return the recording with the places of its cells."""
    storages = [storage | {"places": places}
                for storage, places in zip(recording["storages"], layout.places(recording))]
    return recording | {"storages": storages}


def all_recordings():
    """Return the recordings of SHOWN, with what the page says of them, then those that they are compared with."""
    programs = {shown.program for shown in SHOWN} | {shown.right for shown in SHOWN if shown.right}
    by_program = {program: with_places(recorded(program)) for program in programs}
    recordings = []
    hidden = []
    for shown in SHOWN:
        recording = by_program[shown.program]
        right = by_program.get(shown.right)
        details = {"id": shown.id, "short": shown.short, "title": shown.title, "bug": shown.is_bug, "tab": shown.tab,
                   "beats": beats.resolved(shown.id, recording, right)}
        if shown.is_bug:
            details["edit"] = beats.edit_of(shown.program, recording, right)
        else:
            details["formula"] = {"sent": shown.sent, "held": shown.held, "held_bytes": shown.held_bytes}
        if right:
            details["beside"] = f"{shown.id}-beside"
            hidden.append(right | {"id": details["beside"], "hidden": True})
        recordings.append(recording | details)
    return recordings + hidden


def page(recordings):
    """Return the text of the page that plays `recordings`."""
    data = json.dumps({"programs": recordings}, separators=(",", ":"), ensure_ascii=False)
    packed = gzip.compress(data.encode(), mtime=0)
    parts = {"light": picture.THEMES[""], "dark": picture.THEMES["_dark"], "patterns": picture.patterns(n_owners=8),
             "data": base64.b64encode(packed).decode()}
    parts |= {name: picture.page_file(name) for name in ("cells.css", "watch.css", "watch.js", "calculator.js")}
    text = picture.page_file("watch.html")
    for name, part in parts.items():
        text = text.replace(f"/*{name}*/", part)
    return text + "\n"


def write_all():
    """Write docs/watch.html, and the pictures of README.md and the chapters in two themes."""
    recordings = all_recordings()
    write(PAGE, page(recordings))
    for name, drawn in scenes.pictures({recording["id"]: recording for recording in recordings}).items():
        for theme in picture.THEMES:
            write(ROOT / "results" / f"{name}{theme}.svg", drawn.svg(theme))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(text.encode()) / 1000:.0f} kB")
