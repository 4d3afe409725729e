"""The page that plays: replicated training, the four stages, and each chapter's "bug that you will write".

It is one file that needs nothing else. The chapters' pictures are drawn by it, in a real browser: Debian's chromium,
headless, driven by playwright (`pip install .[browser]`).
"""

import base64
import contextlib
import gzip
import hashlib
import importlib.util
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from harness import STAGES
from harness.workers import Workers

from . import beats, frames, replicated
from .record import CORE_FILES, Program, record_rank

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "watch.html"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright")
MISSING = "no chromium" if not CHROMIUM else "" if HAS_PLAYWRIGHT else "no playwright: pip install .[browser]"
# 64 elements, so that what the ladder says of bytes is seen: every rank owns some, and buckets are about a tenth.
TOY = Program(replicated.__name__, params=(5, 12, 8, 3, 12, 7, 9, 8), optimizer="adamw", buckets=7)
ONE, TWO, THREE, FOUR = (replace(TOY, package=stage) for stage in STAGES)


@dataclass(frozen=True)
class Shown:
    """A program of the page. `right`: the same without the bug."""

    id: str
    short: str
    title: str
    program: Program
    right: Program | None = None


def bug(id, short, title, program, before, after):
    return Shown(id, short, title, replace(program, edit=("optimizer.py", before, after)), program)


SHOWN = (
    Shown("0", "0 replicated", "Replicated training: nothing is sharded.", TOY),
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
SMALL = Shown("3-small", "", "What `make show STAGE=3` prints, for the picture of chapter 3.", Program(STAGES[2]))


def all_recordings():
    """-> the recordings of SHOWN, with what the page says of them; then the hidden ones that it needs too."""
    ids = {one.program: one for one in (*SHOWN, SMALL)}
    for one in SHOWN:
        if one.right:
            ids.setdefault(one.right, Shown(f"{one.id}-right", "", "The right run.", one.right))
    with Workers(4, timeout_s=300) as workers:
        made = {program: frames.recording(workers.run(record_rank, program), program, one.title)
                for program, one in ids.items()}
    for program, one in ids.items():
        recording, right = made[program], made.get(one.right)
        recording |= {"id": one.id, "short": one.short, "bug": bool(right), "hidden": not one.short,
                      "beats": beats.resolved(one.id, recording, right)}
        if right:
            recording |= {"right": ids[one.right].id, "edit": beats.edit_of(program, recording, right)}
        elif one.id in beats.FORMULAS:
            recording["formula"] = dict(zip(("sent", "sent_bytes", "held", "held_bytes"), beats.FORMULAS[one.id]))
    return list(made.values())


def stamp():
    """-> a hash of the cores and of show/, by which a page tells what it was made from."""
    cores = [ROOT / stage / name for stage in STAGES for name in CORE_FILES]
    made_from = sorted(path for path in (*cores, *ROOT.glob("show/*.py")) if path.exists())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in made_from)).hexdigest()


def page(recordings):
    """-> the text of the page that plays `recordings`."""
    data = {"stamp": stamp(), "programs": recordings}
    packed = gzip.compress(json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(), mtime=0)
    html, css, js = ((ROOT / f"show/page/watch.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    text = html.replace("/*css*/", css.strip()).replace("/*js*/", js.strip())
    return text.replace("/*data*/", base64.b64encode(packed).decode())


@contextlib.contextmanager
def browser():
    """A browser that was started for this, with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM) as started:
        yield started


def figures(running=None):
    """-> {file name: text} of the SVG files that the chapters show, as the page draws them. `running`: a browser."""
    with contextlib.nullcontext(running) if running else browser() as started:
        opened = started.new_page()
        opened.goto(PAGE.as_uri())
        opened.wait_for_selector("body[data-ready]")
        return opened.evaluate("() => figures()")
