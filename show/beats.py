"""Reads the sentences of the page, show/beats.txt, and finds the moment of each."""

import re
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


class Visit(NamedTuple):
    """A line that rank 0 has executed."""
    frame: int
    function: int
    line: int


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
    """Return what the sentences say in numbers that depend on d: elements of a shard, and bytes sent."""
    d = recording["ranks"]
    numel = sum(recording["params"])
    half_bytes = 4 * numel * (d - 1) // d
    return {"shard": NUMBERS[numel // d], "half": half_bytes, "both": 2 * half_bytes}


def visits(recording, code):
    """Return a Visit for each time that rank 0 has executed a line with `code`."""
    first_halves = [operation["end"] for operation in recording["operations"]
                    if operation["kind"] == "reduce-scatter" and operation["whole"] == "all-reduce"]
    result = []
    before = None
    for number, frame in enumerate(recording["frames"]):
        stacks = dict(frame["at"])
        if 0 not in stacks:  # rank 0 waits
            continue
        visit = Visit(number, *stacks[0][-1])
        if code in lines_of(recording, visit.function)[visit.line - 1]:
            is_same_line = before is not None and visit[1:] == before[1:]
            if is_same_line and result[-1].frame not in first_halves:
                result.pop()
            result.append(visit)
        before = visit
    if not result:
        raise ValueError(f"rank 0 executes no line with {code!r}")
    return result


def lines_of(recording, function):
    """Return the lines of the file that a function is in."""
    _, file, *_ = recording["functions"][function]
    _, source = recording["files"][file]
    return source.splitlines()


def resolved(id, recording, right=None):
    """Return {says, caption, frame, function, lines, look} of each beat, as the page reads it.

    `right` is the recording that is shown beside it, and in a beat the frame of that recording.
    """
    program = "idea" if id.startswith("idea") else id
    return [resolved_beat(beat, recording, right) for beat in BEATS.get(program, [])]


def resolved_beat(beat, recording, right):
    says = beat.says.format(**facts(recording))
    caption = " ".join(re.findall(r"\[(.*?)\]", says)).rstrip(".")
    visit = visits(recording, beat.code)[beat.visit]
    _, _, first, last, _ = recording["functions"][visit.function]
    source = lines_of(recording, visit.function)
    lines = [visit.line]
    if beat.also:
        lines.append(next(line for line in range(first, last + 1) if beat.also in source[line - 1]))
    resolved = {"says": re.sub(r"[\[\]]", "", says), "caption": caption[:1].upper() + caption[1:],
                "frame": visit.frame, "function": visit.function, "lines": sorted(lines), "look": beat.look}
    if right:
        beside = visits(right, beat.right)[beat.right_visit] if beat.right else visits(right, beat.code)[beat.visit]
        resolved["right"] = beside.frame
    return resolved


def edit_of(program, recording, right):
    """Return the edit as a diff: file, its first line in the edited source, the lines removed, how many are added."""
    file, before, after = program.edit
    number = [title for title, _ in recording["files"]].index(file)
    _, original = right["files"][number]
    first = original[: original.index(before)].count("\n") + 1
    return {"file": number, "line": first, "gone": before.splitlines(), "come": len(after.splitlines())}
