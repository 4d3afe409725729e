"""What the page plays: rung 0, the four stages, and each chapter's "bug that you will write"."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from harness import STAGES
from harness.workers import Workers

from . import frames, page, record, replicated
from .record import Program

ROOT = Path(__file__).resolve().parents[1]
ONE, TWO, THREE, FOUR = STAGES
EIGHT = (1, 2, 3, 4, 1, 2, 3, 4)  # two for each rank: a shard of one parameter is flat as it is, and not copied
CORE_METHODS = ("sync_grads", "step_own", "sync_params", "zero_grad")


@dataclass(frozen=True)
class Shown:
    """A program of the page. `right`: the same without the bug."""

    id: str
    short: str
    title: str
    intro: str
    program: Program
    right: Program | None = None


def bug(id, short, title, intro, program, *edits):
    return Shown(id, short, title, intro, replace(program, edits=edits), program)


SHOWN = (
    Shown(
        "0",
        "0 replicated",
        "Rung 0: nothing is sharded.",
        "Every rank averages all gradients, steps all parameters and holds all moments: the same work and the same "
        "memory, four times.",
        Program(replicated.__name__),
    ),
    Shown(
        "1",
        "1 broadcast",
        "Stage 1, naive broadcast: each parameter has one owner.",
        "Only its owner steps it and holds its moments; then one rank after the other broadcasts what it owns. "
        "Averages that a rank doesn't step turn into garbage at once: they needn't have travelled.",
        Program(ONE),
    ),
    Shown(
        "2",
        "2 all-gather",
        "Stage 2, all-gather: one collective brings all parameters back.",
        "As stage 1, but shards are padded to the longest and gathered at once: look at how much of it is padding.",
        Program(TWO),
    ),
    Shown(
        "3",
        "3 grad buffer",
        "Stage 3, grad buffer: gradients and parameters take turns in one flat buffer.",
        "Each rank owns a line of it, wherever that cuts through parameters. After sync_grads a rank holds the "
        "averages of its own line, and garbage.",
        Program(THREE),
    ),
    Shown(
        "4",
        "4 overlap",
        "Stage 4, overlap: buckets leave during the backward pass, parameters come back during the next forward.",
        "Messages stay under way while lines below go on. Two bucket buffers take turns, and the "
        "third bucket waits; afterwards a layer waits for its own parameters only.",
        Program(FOUR),
    ),
    bug(
        "1-copy",
        "1: not copied back",
        "Bug of stage 1: what was broadcast isn't copied back.",
        "One line is gone from sync_params. Each rank goes on with its own parameters new and all others old.",
        Program(ONE, params=EIGHT),
        ("optimizer.py", "                copy_all(shard, cut_like(flat, shard))\n", ""),
    ),
    bug(
        "2-order",
        "2: another order",
        "Bug of stage 2: a shard is packed in another order than it is unpacked in.",
        "sync_params takes its parameters from the optimizer's groups, whose order is the model's; the others cut them "
        "in the order of shards, the largest first.",
        Program(TWO, params=EIGHT),
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
        Program(THREE, steps=2),
        ("optimizer.py", "def zero_grad(", "def unused("),
    ),
    bug(
        "3-zero",
        "3: not zeroed",
        "Bug of stage 3: step doesn't zero the buffer.",
        "The loop has no zero_grad of its own, so in the second step gradients are added to parameters.",
        Program(THREE, steps=2, loop="train_without_zero_grad"),
        ("optimizer.py", "        self.zero_grad()\n", ""),
    ),
    bug(
        "4-queue",
        "4: buckets leave as they come",
        "Bug of stage 4: no queue, each bucket leaves when it is full.",
        "Rank 1 calls its layers in another order, so its gradients come in another order. The message of one layer "
        "meets that of another; both are as long, nothing hangs, and the sums are of different layers.",
        Program(FOUR, params=(4, 4, 4), orders=((1, (2, 1, 0)),)),
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
        Program(FOUR),
        ("optimizer.py", "self.bucket_of[param].finish_param_sync()", "self.buckets[-1].finish_param_sync()"),
    ),
)


def recording_of(program, workers=None, title=""):
    """Runs `program`, and makes a recording of it."""
    with record.edited(program) as package:
        sources = frames.sources_of(record.core_files(package))
    return frames.recording(record.record(program, workers), program, sources, title)


def all_recordings(shown=SHOWN):
    """-> the recordings of `shown`, with what the page says of them."""
    made, result = {}, []
    with contextlib.ExitStack() as stack:
        workers = {}

        def recorded(program):
            if program not in made:
                if program.ranks not in workers:
                    workers[program.ranks] = stack.enter_context(Workers(program.ranks, timeout_s=60))
                made[program] = recording_of(program, workers[program.ranks])
            return made[program]

        for one in shown:
            made_of = recorded(one.program)
            words = {"id": one.id, "short": one.short, "title": one.title, "intro": one.intro, "bug": bool(one.right)}
            if one.right is not None:
                words["differs"] = first_difference(made_of, recorded(one.right))
            result.append({**made_of, **words})
    return result


# ------------------------------------------------------------------------------------- where a bug begins to be seen


def first_difference(wrong, right):
    """-> {frame, cells: [storage, cell], text}: where values of `wrong` first aren't those of `right`, garbage aside.

    Both are compared where they surely are at the same point: at each line of the loop, and where a method of the core
    begins. What differs there for the first time was written since the point before, or should have been.
    """
    theirs, first, found, places = {}, None, [], {}
    for point, _, memory in states_at_points(right):
        theirs.setdefault(point, memory)
    for point, frame, memory in states_at_points(wrong):
        if point not in theirs:
            continue
        cells = [
            (place, value, theirs[point][place][0])
            for place, (value, _, _) in memory.items()
            if place in theirs[point]
            and theirs[point][place][0] != value
            and not (memory[place][2] or theirs[point][place][2])
        ]
        if cells and first is not None and first != frame:
            break
        if cells:
            first = frame
            found += cells
            places.update(memory)
    if first is None:
        raise RuntimeError("the bug changes no value")
    since = [places[place][1] for place, _, _ in found if places[place][1] > points_before(wrong, first)]
    storages = dict(numbers_of(wrong))
    (rank, row, *_), value, wanted = found[0]
    text = f"Here values first differ from the right run: rank {rank} has {value:g} in {row}, not {wanted:g}."
    return {
        "frame": min(since) if since else first,
        "text": text,
        "cells": [[storages[place[:3]], place[3]] for place, _, _ in found],
    }


def numbers_of(recording):
    for number, storage in enumerate(recording["storages"]):
        yield (storage["rank"], storage["row"], storage["part"]), number


def states_at_points(recording):
    """-> (point, frame, {(rank, row, part, cell): (value, frame of its last write, is garbage)}), rank by rank."""
    functions, loop_file = recording["functions"], 0
    names = {number: place for place, number in numbers_of(recording)}
    memory, dead, counts, calls = {}, {}, {}, {}
    for index, frame in enumerate(recording["frames"]):
        before = dict(memory)
        for storage, start, values, _ in frame["cells"]:
            for offset, value in enumerate(values):
                memory[(*names[storage], start + offset)] = value, index, False
        for storage, cells in frame["dead"]:
            dead[storage] = set(cells)
        for storage in frame["gone"]:
            memory = {place: one for place, one in memory.items() if place[:3] != names[storage]}
        for rank, stack in frame["at"]:
            places = recording["stacks"][stack]
            leaf = functions[places[-1][0]]
            in_loop = leaf[1] == loop_file
            is_first = leaf[0].split(".")[-1] in CORE_METHODS and calls.get(rank) != (leaf[0], len(places))
            calls[rank] = (
                (leaf[0], len(places))
                if leaf[0].split(".")[-1] in CORE_METHODS
                else (calls.get(rank) if calls.get(rank) and len(places) > calls[rank][1] else None)
            )
            if in_loop or is_first:
                key = rank, leaf[0], places[-1][1] if in_loop else 0
                counts[key] = counts.get(key, -1) + 1
                numbers = {place: number for number, place in names.items()}
                yield (
                    (*key, counts[key]),
                    index,
                    {
                        place: (value, at, place[3] in dead.get(numbers[place[:3]], ()))
                        for place, (value, at, _) in before.items()
                        if place[0] == rank
                    },
                )


def points_before(recording, frame):
    """-> the last frame before `frame` in which all ranks were at the loop's own lines."""
    last = -1
    for index, one in enumerate(recording["frames"][:frame]):
        if one["at"] and all(
            recording["functions"][recording["stacks"][stack][-1][0]][1] == 0 for _, stack in one["at"]
        ):
            last = index
    return last


# ---------------------------------------------------------------------------------------------------------- the page


RECORDER = ("clock", "frames", "labels", "loop", "programs", "record", "replicated", "trace", "wires")


def stamp():
    """-> a hash of what recordings are made from: the cores, and the recorder."""
    cores = [ROOT / stage / name for stage in STAGES for name in record.CORE_FILES]
    recorder = [ROOT / "show" / f"{name}.py" for name in RECORDER]
    return page.stamp_of([path for path in cores + recorder if path.exists()], ROOT)


def whole_page():
    return page.page(all_recordings(), stamp())
