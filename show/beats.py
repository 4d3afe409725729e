"""Reads the sentences of the page, show/beats.txt, and finds the moment of each; has the formulas of the counters."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Beat(NamedTuple):
    """See show/beats.txt."""
    says: str
    code: str
    visit: int = 0
    also: str = ""
    look: str = ""
    right: str = ""
    right_visit: int = 0


NUMBERS = "none one two three four five six seven eight".split()


def read(text):
    """Return {id of a program: its Beats}."""
    beats = {}
    for section in text.split("\n## ")[1:]:
        ids, _, paragraphs = section.partition("\n")
        for paragraph in paragraphs.strip().split("\n\n"):
            says, *lines = paragraph.split("\n- ")
            fields = dict(line.split(": ", 1) for line in lines)
            for name in {"visit", "right_visit"} & fields.keys():
                fields[name] = int(fields[name])
            for id in ids.split(", "):
                beats.setdefault(id, []).append(Beat(says.replace("\n", " "), **fields))
    return beats


BEATS = read(Path(__file__).with_name("beats.txt").read_text(encoding="utf-8"))


def facts(recording):
    """Return what the sentences say in numbers: elements, bytes of fp32, and what the ranks own."""
    numel = sum(recording["params"])
    d = recording["ranks"]
    params = recording["params"]
    owned = sorted(Counter(recording["owners"]).values())
    n_buckets = sum(operation["kind"] == "reduce-scatter" for operation in recording["operations"])
    half = 4 * numel * (d - 1) // d
    return {"numel": numel, "tensors": NUMBERS[len(params)], "whole": 4 * numel, "half": half, "both": 2 * half,
            "shard": NUMBERS[numel // d] if numel // d <= 8 else numel // d, "moments": 8 * numel // d,
            "sent": int(recording["sent_bytes"]),
            "least": owned[0], "most": owned[-1], "own": recording["owners"].count(0),
            "buckets": NUMBERS[n_buckets], "others": NUMBERS[max(0, n_buckets - 1)]}


def formulas(id, recording):
    """Return what a rank sends in a step, and holds after one, before zero_grad: as text and in bytes, with AdamW."""
    numel, d = sum(recording["params"]), recording["ranks"]
    rows = {storage["row"]: storage["numel"] for storage in recording["storages"]}
    twice = "2·4Ψ·(d-1)/d"
    thrice = "3·4Ψ·(d-1)/d"
    sharded = ("(8 + 8/d)Ψ", (8 + 8 / d) * numel)
    sent, held = {
        "0": ((twice, 8 * numel), ("16Ψ", 16 * numel)),
        "1": ((thrice, 12 * numel), sharded),
        "2": ((f"{thrice} + padding", 8 * numel + 4 * rows.get("sync_params: gathered", 0)), sharded),
        "3": ((twice, 8 * numel), sharded),
        "4": ((twice, 8 * numel),
              ("(4 + 12/d)Ψ + two buckets", (4 + 12 / d) * numel + 2 * 4 * rows.get("BucketBuffer.sent", 0))),
    }[re.sub("idea.*", "3", id)]
    return {"sent": sent[0], "sent_bytes": sent[1] * (d - 1) // d, "held": held[0], "held_bytes": int(held[1]),
            "ddp_sent": 8 * numel * (d - 1) // d, "ddp_held": 16 * numel}


def visits(recording, code):
    """Return (frame, function, line) of each time that rank 0 has executed a line with `code`."""
    first_halves = {max(arrow[4] for arrow in operation["arrows"]) for operation in recording["operations"]
                    if operation["kind"] == "reduce-scatter" and operation["whole"] == "all-reduce"}
    places = []
    before = None
    for index, frame in enumerate(recording["frames"]):
        stack = dict(frame["at"]).get(0)
        if stack is None:  # rank 0 waits
            continue
        here = function, line = tuple(recording["stacks"][stack][-1])
        if code in lines_of(recording, function)[line - 1]:
            if here == before and places[-1][0] not in first_halves:
                places.pop()
            places.append((index, function, line))
        before = here
    return places


def lines_of(recording, function):
    """-> the lines of the file that a function is in."""
    return recording["files"][recording["functions"][function][1]][1].splitlines()


def resolved(id, recording, right=None):
    """Return {says, caption, frame, function, lines, look} of each beat, as the page reads it.

    `right` is the recording that is shown beside it, and in a beat the frame of that.
    """
    return [resolved_beat(beat, recording, right) for beat in BEATS.get(re.sub("idea.*", "idea", id), ())]


def resolved_beat(beat, recording, right):
    says = beat.says.format(**facts(recording))
    caption = " ".join(re.findall(r"\[(.*?)\]", says)).rstrip(".")
    try:
        frame, function, line = visits(recording, beat.code)[beat.visit]
        _, _, first, last, _ = recording["functions"][function]
        source = lines_of(recording, function)
        also = [next(n for n in range(first, last + 1) if text in source[n - 1])
                for text in filter(None, beat.also.split(" | "))]
        beside = (beat.right, beat.right_visit) if beat.right else (beat.code, beat.visit)
        compared = {"right": visits(right, beside[0])[beside[1]][0]} if right else {}
    except (IndexError, StopIteration) as error:
        raise ValueError(f"no such line in {recording['title']!r}: {beat}") from error
    return {"says": re.sub(r"[\[\]]", "", says), "caption": caption[:1].upper() + caption[1:], "frame": frame,
            "function": function, "lines": sorted([line, *also]), "look": beat.look} | compared


def edit_of(program, recording, right):
    """Return the edit as a diff: file, its first line in the edited source, the lines removed, how many are added."""
    name, before, after = program.edit
    file = [title for title, _ in recording["files"]].index(name)
    original = right["files"][file][1]
    first = original[: original.index(before)].count("\n") + 1
    return {"file": file, "line": first, "gone": before.splitlines(), "come": len(after.splitlines())}
