"""What the page plays: rung 0, the four stages, and each chapter's "bug that you will write"."""

from dataclasses import dataclass, replace
from pathlib import Path

from harness import STAGES
from harness.workers import Workers

from . import beats, frames, page, record, replicated
from .record import Program

ROOT = Path(__file__).resolve().parents[1]
ONE, TWO, THREE, FOUR = STAGES
# 64 elements, so that what the ladder says of bytes is seen: every rank owns some, and buckets are about a tenth.
TOY = {"params": (5, 12, 8, 3, 12, 7, 9, 8), "optimizer": "adamw", "buckets": 7}


@dataclass(frozen=True)
class Shown:
    """A program of the page. `right`: the same without the bug."""

    id: str
    short: str
    title: str
    intro: str
    program: Program
    right: Program | None = None


def toy(package, **settings):
    return Program(package, **TOY | settings)


def bug(id, short, title, intro, program, *edits):
    return Shown(id, short, title, intro, replace(program, edits=edits), program)


SHOWN = (
    Shown(
        "0",
        "0 replicated",
        "Rung 0: nothing is sharded.",
        "Every rank averages all gradients, steps all parameters and holds all moments: the same work and the same "
        "memory, four times.",
        toy(replicated.__name__),
    ),
    Shown(
        "1",
        "1 broadcast",
        "Stage 1, naive broadcast: each parameter has one owner.",
        "Only its owner steps it and holds its moments; then one rank after the other broadcasts what it owns. "
        "Averages that a rank doesn't step turn into garbage at once: they needn't have travelled.",
        toy(ONE),
    ),
    Shown(
        "2",
        "2 all-gather",
        "Stage 2, all-gather: one collective brings all parameters back.",
        "As stage 1, but shards are padded to the longest and gathered at once: look at how much of it is padding.",
        toy(TWO),
    ),
    Shown(
        "3",
        "3 grad buffer",
        "Stage 3, grad buffer: gradients and parameters take turns in one flat buffer.",
        "Each rank owns a line of it, wherever that cuts through parameters. After sync_grads a rank holds the "
        "averages of its own line, and garbage.",
        toy(THREE),
    ),
    Shown(
        "4",
        "4 overlap",
        "Stage 4, overlap: buckets leave during the backward pass, parameters come back during the next forward.",
        "Messages stay under way while lines below go on. Two bucket buffers take turns, and the "
        "third bucket waits; afterwards a layer waits for its own bucket only.",
        toy(FOUR),
    ),
    bug(
        "1-copy",
        "1: not copied back",
        "Bug of stage 1: what was broadcast isn't copied back.",
        "One line is gone from sync_params. Each rank goes on with its own parameters new and all others old.",
        toy(ONE),
        ("optimizer.py", "                copy_all(shard, cut_like(flat, shard))\n", ""),
    ),
    bug(
        "2-order",
        "2: another order",
        "Bug of stage 2: a shard is packed in another order than it is unpacked in.",
        "sync_params takes its parameters from the optimizer's groups, whose order is the model's; the others cut them "
        "in the order of shards, the largest first.",
        toy(TWO),
        (
            "optimizer.py",
            "mine = self.shards[self.rank]\n",
            'mine = [param for group in self.optimizer.param_groups for param in group["params"]]\n',
        ),
    ),
    bug(
        "3-none",
        "3: gradients set to None",
        "Bug of stage 3: zero_grad is left to torch.",
        "torch sets param.grad to None. In the second step gradients miss the buffer, which still holds parameters, "
        "and those are taken for gradients.",
        toy(THREE, steps=2),
        ("optimizer.py", "def zero_grad(", "def unused("),
    ),
    bug(
        "3-zero",
        "3: not zeroed",
        "Bug of stage 3: step doesn't zero the buffer.",
        "The loop has no zero_grad of its own, so in the second step gradients are added to parameters.",
        toy(THREE, steps=2, loop="train_without_zero_grad"),
        ("optimizer.py", "        self.zero_grad()\n", ""),
    ),
    bug(
        "4-queue",
        "4: buckets leave as they come",
        "Bug of stage 4: no queue, each bucket leaves when it is full.",
        "Rank 1 calls its layers in another order, so its gradients come in another order. The message of one layer "
        "meets that of another; both are as long, nothing hangs, and the sums are of different layers.",
        toy(FOUR, params=(4, 4, 4), buckets=3, orders=((1, (2, 1, 0)),)),
        (
            "optimizer.py",
            "        self.bucket_of[param].ready.add(param)\n        self.send_full_buckets()\n",
            "        bucket = self.bucket_of[param]\n        bucket.ready.add(param)\n"
            "        if bucket.is_full():\n            self.send_grads(bucket)\n",
        ),
    ),
    bug(
        "4-wait",
        "4: waits for another bucket",
        "Bug of stage 4: a layer waits for another bucket than its own.",
        "It waits for the one that comes back first, and computes with parameters that are one step old. On a real "
        "line this is a race; here what nobody waits for doesn't arrive.",
        toy(FOUR),
        ("optimizer.py", "self.bucket_of[param].finish_param_sync()", "self.buckets[-1].finish_param_sync()"),
    ),
)


def recording_of(program, workers=None, title=""):
    """Runs `program`, and makes a recording of it."""
    with record.edited(program) as package:
        sources = frames.sources_of(record.core_files(package))
    return frames.recording(record.record(program, workers), program, sources, title)


def all_recordings(shown=SHOWN):
    """-> the recordings of `shown`, with what the page says of them; then the runs without a bug that it needs too."""
    with Workers(4, timeout_s=300) as workers:
        programs = dict.fromkeys([one.program for one in shown] + [one.right for one in shown if one.right])
        made = {program: recording_of(program, workers) for program in programs}
    ids = {one.program: one.id for one in shown}
    for one in shown:
        ids.setdefault(one.right, f"{one.id}-right")
    result = []
    for one in shown:
        recording, right = made[one.program], made.get(one.right)
        said = {"id": one.id, "short": one.short, "title": one.title, "intro": one.intro, "bug": bool(right)}
        recording["title"] = one.title
        said["beats"] = [beats.resolved(beat, recording, right) for beat in beats.BEATS[one.id]]
        if right:
            said |= {"right": ids[one.right], "edit": beats.edit_of(one.program, recording, right)}
        else:
            said["formula"] = beats.FORMULAS[one.id]._asdict()
        result.append({**recording, **said})
    hidden = {"short": "the right run", "intro": "", "bug": False, "hidden": True, "beats": []}
    return result + [
        {**made[program], **hidden, "id": name, "title": "The right run."}
        for program, name in ids.items()
        if program and name.endswith("-right")
    ]


# ---------------------------------------------------------------------------------------------------------- the page


RECORDER = ("beats", "clock", "frames", "labels", "loop", "programs", "record", "replicated", "trace", "wires")


def stamp():
    """-> a hash of what recordings are made from: the cores, and the recorder."""
    cores = [ROOT / stage / name for stage in STAGES for name in record.CORE_FILES]
    recorder = [ROOT / "show" / f"{name}.py" for name in RECORDER]
    return page.stamp_of([path for path in cores + recorder if path.exists()], ROOT)


def whole_page():
    return page.page(all_recordings(), stamp())
