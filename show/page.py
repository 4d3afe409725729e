"""Writes docs/watch.html, the page that plays programs line by line, and the pictures that are drawn from its data.

A program (show/record.py) is a short training on several ranks with one optimizer. Each program is recorded once, and
its recording (show/frames.py) becomes a part of the page. The page has

    a tab for replicated training, where every rank updates all parameters, as with DDP
    a tab for each stage: an optimizer of this project that shards (folders stage*/)
    a tab for the idea that all stages share
    a menu of bugs. A bug is a stage with one mistake, of which the stage's chapter warns

The page is one file that needs nothing else. `make show` writes a page with only one program.
"""

import base64
import functools
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
ALONE = Path("measured", "show.html")  # in the folder from which the program is started
# Numbers of elements of each parameter: 16 in all, so that on the page a cell has room for its value.
OWNED = (2, 2, 3, 3, 3, 3)  # for stages 1 and 2, where each rank updates whole parameters: here one or two
IN_BUCKETS = (2, 2, 4, 4, 4)  # for stage 4: four buckets, each of one parameter or two, which need no padding
REPLICATED = Program(replicated.__name__)
BROADCAST = Program(STAGE_1, params=OWNED)
ALL_GATHER = Program(STAGE_2, params=OWNED)
GRAD_BUFFER = Program(STAGE_3)
OVERLAP = Program(STAGE_4, params=IN_BUCKETS, bucket_bytes=16)
# Formulas for bytes, which the page shows. Ψ: number of elements of the model; d: number of ranks.
SENT_TWICE = "2·4Ψ·(d-1)/d"
SENT_THRICE = "3·4Ψ·(d-1)/d"
HELD_IF_SHARDED = "(8 + 8/d)Ψ"


@dataclass(frozen=True)
class Shown:
    """A program of the page, and what the page says about it. Sentences about single lines are in show/beats.txt."""
    id: str  # in links to the page, and in show/beats.txt
    short: str  # the words on the tab, or in the menu of bugs
    title: str
    program: Program
    sent: str = ""  # formula for the bytes that a rank sends in a step
    held: str = ""  # formula for the bytes that a rank holds after the step with AdamW, before zero_grad
    held_bytes: int = 0  # what the formula `held` gives for this program
    right: Program | None = None  # the program that is shown beside, if any: without the bug, or replicated training
    is_bug: bool = False
    tab: str = ""  # if the program has no tab of its own: the id of the program whose tab leads to this program


def bug(id, short, title, program, before, after):
    """Return a Shown of `program` with a bug: in its optimizer.py the text `before` is replaced by `after`."""
    edited = replace(program, edit=Edit("optimizer.py", before, after))
    return Shown(id, short, title, edited, right=program, is_bug=True)


def idea(d, id, held_bytes, tab=""):
    """Return a Shown of stage 3 beside replicated training, on d ranks: the idea that all stages share."""
    title = "An all-reduce in two halves, with the update between them."
    stage_3 = replace(GRAD_BUFFER, ranks=d)
    ddp = replace(REPLICATED, ranks=d)
    return Shown(id, "idea", title, stage_3, SENT_TWICE, HELD_IF_SHARDED, held_bytes, right=ddp, tab=tab)


SHOWN = (  # in the order of the page
    idea(4, "idea", 160),
    Shown("0", "0 replicated", "Replicated training: nothing is sharded.", REPLICATED, SENT_TWICE, "16Ψ", 256),
    Shown("1", "1 broadcast", "Stage 1, naive broadcast: each parameter has one owner.", BROADCAST,
          SENT_THRICE, HELD_IF_SHARDED, 160),
    Shown("2", "2 all-gather", "Stage 2, all-gather: one collective brings all parameters back.", ALL_GATHER,
          f"{SENT_THRICE} + padding", HELD_IF_SHARDED, 160),
    Shown("3", "3 grad buffer", "Stage 3, grad buffer: gradients and parameters take turns in one flat buffer.",
          GRAD_BUFFER, SENT_TWICE, HELD_IF_SHARDED, 160),
    Shown("4", "4 overlap", "Stage 4, overlap: buckets leave during the backward pass, parameters arrive during the "
          "next forward pass.", OVERLAP, SENT_TWICE, "(4 + 12/d)Ψ + two buckets", 144),
    bug("1-copy", "1: not copied back", "Bug of stage 1: what was broadcast isn't copied back.", BROADCAST,
        "                copy_all(shard, cut_like(flat, shard))\n", ""),
    bug("2-order", "2: another order", "Bug of stage 2: a shard is packed in another order than it is unpacked in.",
        ALL_GATHER, "mine = self.shards[self.rank]\n",
        'mine = [param for group in self.optimizer.param_groups for param in group["params"]]\n'),
    bug("3-none", "3: gradients set to None", "Bug of stage 3: zero_grad is left to torch.",
        replace(GRAD_BUFFER, steps=2), "def zero_grad(", "def unused("),
    bug("3-zero", "3: not zeroed", "Bug of stage 3: step doesn't zero the buffer.",
        replace(GRAD_BUFFER, steps=2, loop="train_without_zero_grad"), "        self.zero_grad()\n", ""),
    bug("4-queue", "4: buckets leave as they come", "Bug of stage 4: no queue, each bucket leaves when it is full.",
        replace(OVERLAP, params=(4, 4, 4), is_rank_1_reversed=True),
        "        self.bucket_of[param].ready.add(param)\n        self.send_full_buckets()\n",
        "        bucket = self.bucket_of[param]\n        bucket.ready.add(param)\n"
        "        if bucket.is_full():\n            self.send_grads(bucket)\n"),
    bug("4-wait", "4: waits for another bucket", "Bug of stage 4: a layer waits for another bucket than its own.",
        OVERLAP, "self.bucket_of[param].finish_param_sync()", "self.buckets[-1].finish_param_sync()"),
    idea(2, "idea-2", 192, tab="idea"),
    idea(8, "idea-8", 144, tab="idea"),
)


@functools.cache
def recorded(program):
    """Run a program on its ranks. Return its recording, with the places at which cells are drawn (show/layout.py)."""
    with Workers(program.ranks, timeout_s=600) as workers:
        records = workers.run(record_rank, program)
    return layout.with_places(frames.recording(records, program))


def recordings_of(programs_shown):
    """Return the recordings of some Shown, with what the page says about them, and then the recordings shown beside.

    A recording that is shown beside another is hidden: it has no tab. The page finds it by its id.
    """
    recordings = []
    beside = []
    for shown in programs_shown:
        recording = recorded(shown.program)
        right = recorded(shown.right) if shown.right else None
        details = {"id": shown.id, "short": shown.short, "title": shown.title, "bug": shown.is_bug, "tab": shown.tab,
                   "beats": beats.resolved(shown.id, recording, right)}
        if shown.is_bug:
            details["edit"] = beats.edit_of(shown.program, recording, right)
        else:
            details["formula"] = {"sent": shown.sent, "held": shown.held, "held_bytes": shown.held_bytes}
        if right:
            details["beside"] = f"{shown.id}-beside"
            beside.append(right | {"id": details["beside"], "hidden": True})
        recordings.append(recording | details)
    return recordings + beside


def page(recordings):
    """Return the text of the page that plays `recordings`."""
    data = json.dumps({"programs": recordings}, separators=(",", ":"), ensure_ascii=False)
    packed = gzip.compress(data.encode(), mtime=0)  # without the time of day, so that equal data gives an equal page
    parts = {"light": picture.THEMES[""], "dark": picture.THEMES["_dark"], "patterns": picture.patterns(n_owners=8),
             "data": base64.b64encode(packed).decode()}
    parts |= {name: picture.page_file(name) for name in ("cells.css", "watch.css", "watch.js", "calculator.js")}
    text = picture.page_file("watch.html")
    for name, part in parts.items():  # the template has a mark such as /*data*/ where a part belongs
        text = text.replace(f"/*{name}*/", part)
    return text + "\n"


def write_alone(stage):
    """Write measured/show.html, a page with one program.

    stage: the id of a program in SHOWN, or the name or path of a package with a ShardedOptimizer.
    """
    package = stage.strip("/").replace("/", ".")
    shown = Shown(package, package, f"The core of {package}, line by line.", Program(package))
    for in_page in SHOWN:
        if in_page.id == stage:
            shown = in_page
    ALONE.write_text(page(recordings_of([shown])), encoding="utf-8")
    print(f"written to {ALONE}: open it in a browser")


def write_all():
    """Write docs/watch.html. Write the pictures of README.md and the chapters into results/, each light and dark."""
    recordings = recordings_of(SHOWN)
    write(PAGE, page(recordings))
    for name, drawn in scenes.pictures({recording["id"]: recording for recording in recordings}).items():
        for theme in picture.THEMES:
            write(ROOT / "results" / f"{name}{theme}.svg", drawn.svg(theme))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(text.encode()) / 1000:.0f} kB")
