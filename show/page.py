"""The page that plays: the idea, replicated training, the four stages, and each chapter's "bug that you will write".

It is one file that needs nothing else.
"""

import base64
import gzip
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from harness import STAGES
from harness.ranks.workers import Workers

from . import beats, frames, layout, picture, replicated
from .record import CORE_FILES, Program, record_rank

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("watch.css", "watch.js", "calculator.js")
PAGE = ROOT / "docs" / "watch.html"
# 16 elements, so that a cell has room for its value; `make show STAGE=3` prints the first.
WHOLE = Program(replicated.__name__)
OWNED = {"params": (2, 2, 3, 3, 3, 3)}  # every rank owns some tensors, and rank 0 two
FILLED = {"params": (2, 2, 4, 4, 4), "buckets": 4}  # four buckets, of one tensor or two, that need no padding
ONE, TWO, THREE, FOUR = (replace(WHOLE, package=stage, **toy) for stage, toy in zip(STAGES, (OWNED, OWNED, {}, FILLED)))


@dataclass(frozen=True)
class Shown:
    """A program of the page. `right`: what it is compared with."""
    id: str
    short: str
    title: str
    program: Program
    right: Program | None = None
    is_bug: bool = False


def bug(id, short, title, program, before, after):
    edited = replace(program, edit=("optimizer.py", before, after))
    return Shown(id, short, title, edited, right=program, is_bug=True)


SHOWN = (
    Shown("idea", "idea", "An all-reduce in two halves, with the update between them.", THREE, right=WHOLE),
    Shown("0", "0 replicated", "Replicated training: nothing is sharded.", WHOLE),
    Shown("1", "1 broadcast", "Stage 1, naive broadcast: each parameter has one owner.", ONE),
    Shown("2", "2 all-gather", "Stage 2, all-gather: one collective brings all parameters back.", TWO),
    Shown("3", "3 grad buffer", "Stage 3, grad buffer: gradients and parameters take turns in one flat buffer.", THREE),
    Shown("4", "4 overlap", "Stage 4, overlap: buckets leave during the backward pass, parameters arrive during the "
          "next forward pass.", FOUR),
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
        replace(FOUR, params=(4, 4, 4), buckets=3, orders=((1, (2, 1, 0)),)),
        "        self.bucket_of[param].ready.add(param)\n        self.send_full_buckets()\n",
        "        bucket = self.bucket_of[param]\n        bucket.ready.add(param)\n"
        "        if bucket.is_full():\n            self.send_grads(bucket)\n"),
    bug("4-wait", "4: waits for another bucket", "Bug of stage 4: a layer waits for another bucket than its own.",
        FOUR, "self.bucket_of[param].finish_param_sync()", "self.buckets[-1].finish_param_sync()"),
)


def all_recordings():
    """Return the recordings of SHOWN, with what the page says of them, then those that they are compared with."""
    programs = {program for shown in SHOWN for program in (shown.program, shown.right) if program}
    with Workers(4, timeout_s=600) as workers:
        recorded = {program: frames.recording(workers.run(record_rank, program), program) for program in programs}
    for recording in recorded.values():
        for storage, places in zip(recording["storages"], layout.places(recording)):
            storage["places"] = places
    recordings, hidden = [], []
    for shown in SHOWN:
        recording = recorded[shown.program]
        right = recorded.get(shown.right)
        details = {"id": shown.id, "short": shown.short, "title": shown.title, "bug": shown.is_bug,
                   "beats": beats.resolved(shown.id, recording, right)}
        if shown.is_bug:
            details["edit"] = beats.edit_of(shown.program, recording, right)
        else:
            details["formula"] = beats.formulas(shown.id, recording)
        if right:
            details["beside"] = f"{shown.id}-beside"
            hidden.append(right | {"id": details["beside"], "title": "", "hidden": True})
        recordings.append(recording | details)
    return recordings + hidden


def stamp():
    """-> a hash of the cores and of show/, by which a page tells what it was made from."""
    cores = [ROOT / stage / name for stage in STAGES for name in CORE_FILES]
    files = sorted(path for path in (*cores, *ROOT.glob("show/*.py")) if path.exists())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def page(recordings):
    """-> the text of the page that plays `recordings`."""
    data = {"stamp": stamp(), "programs": recordings}
    packed = gzip.compress(json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(), mtime=0)
    css, js, calculator, text = (
        (ROOT / "show/page" / name).read_text(encoding="utf-8").strip() for name in (*PARTS, "watch.html"))
    parts = {"css": f"{picture.CSS}\n{css}", "js": f"{js}\n\n{calculator}\n\nstart();", "light": picture.THEMES[""],
             "dark": picture.THEMES["_dark"], "patterns": picture.patterns(),
             "data": base64.b64encode(packed).decode()}
    for name, part in parts.items():
        text = text.replace(f"/*{name}*/", part)
    return text + "\n"
