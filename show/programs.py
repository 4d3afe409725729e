"""What the page plays: replicated training, the four stages, and each chapter's "bug that you will write"."""

from dataclasses import dataclass, replace
from pathlib import Path

from harness import STAGES
from harness.workers import Workers

from . import beats, frames, page, replicated
from .record import CORE_FILES, Program, record_rank

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
    program: Program
    right: Program | None = None


def toy(package, **settings):
    return Program(package, **TOY | settings)


def bug(id, short, title, program, *edit):
    return Shown(id, short, title, replace(program, edits=(edit,)), program)


SHOWN = (
    Shown("0", "0 replicated", "Replicated training: nothing is sharded.", toy(replicated.__name__)),
    Shown("1", "1 broadcast", "Stage 1, naive broadcast: each parameter has one owner.", toy(ONE)),
    Shown("2", "2 all-gather", "Stage 2, all-gather: one collective brings all parameters back.", toy(TWO)),
    Shown("3", "3 grad buffer", "Stage 3, grad buffer: gradients and parameters take turns in one flat buffer.",
          toy(THREE)),
    Shown("4", "4 overlap", "Stage 4, overlap: buckets leave during the backward pass, parameters arrive during the "
          "next forward pass.", toy(FOUR)),
    bug("1-copy", "1: not copied back", "Bug of stage 1: what was broadcast isn't copied back.", toy(ONE),
        "optimizer.py", "                copy_all(shard, cut_like(flat, shard))\n", ""),
    bug("2-order", "2: another order", "Bug of stage 2: a shard is packed in another order than it is unpacked in.",
        toy(TWO), "optimizer.py", "mine = self.shards[self.rank]\n",
        'mine = [param for group in self.optimizer.param_groups for param in group["params"]]\n'),
    bug("3-none", "3: gradients set to None", "Bug of stage 3: zero_grad is left to torch.",
        toy(THREE, steps=2), "optimizer.py", "def zero_grad(", "def unused("),
    bug("3-zero", "3: not zeroed", "Bug of stage 3: step doesn't zero the buffer.",
        toy(THREE, steps=2, loop="train_without_zero_grad"), "optimizer.py", "        self.zero_grad()\n", ""),
    bug("4-queue", "4: buckets leave as they come", "Bug of stage 4: no queue, each bucket leaves when it is full.",
        toy(FOUR, params=(4, 4, 4), buckets=3, orders=((1, (2, 1, 0)),)), "optimizer.py",
        "        self.bucket_of[param].ready.add(param)\n        self.send_full_buckets()\n",
        "        bucket = self.bucket_of[param]\n        bucket.ready.add(param)\n"
        "        if bucket.is_full():\n            self.send_grads(bucket)\n"),
    bug("4-wait", "4: waits for another bucket", "Bug of stage 4: a layer waits for another bucket than its own.",
        toy(FOUR), "optimizer.py", "self.bucket_of[param].finish_param_sync()", "self.buckets[-1].finish_param_sync()"),
)
SMALL = Shown("3-small", "", "What `make show STAGE=3` prints, for the picture of chapter 3.", Program(THREE))


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
            recording["formula"] = beats.FORMULAS[one.id]._asdict()
    return list(made.values())


RECORDER = ("beats", "clock", "frames", "labels", "loop", "programs", "record", "replicated", "trace", "wires")


def stamp():
    """-> a hash of what recordings are made from: the cores, and the recorder."""
    paths = [ROOT / stage / name for stage in STAGES for name in CORE_FILES if (ROOT / stage / name).exists()]
    return page.stamp_of([*paths, *(ROOT / "show" / f"{name}.py" for name in RECORDER)], ROOT)
