"""Reads the sentences of the page, show/beats.txt, and finds the frame of a recording that each sentence is about."""

import re
from pathlib import Path
from typing import NamedTuple


class Beat(NamedTuple):
    """A sentence, and the moment at which it is shown. The fields have their meaning from the top of show/beats.txt."""
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
    function: int  # an index in recording["functions"]
    line: int


NUMBER_WORDS = "none one two three four five six seven eight".split()


def read(text):
    """Return {id of a program: its Beats}. text: of show/beats.txt."""
    beats = {}
    _, *sections = text.split("\n## ")
    for section in sections:
        ids, _, paragraphs = section.partition("\n")
        for paragraph in paragraphs.strip().split("\n\n"):
            says, *lines = paragraph.split("\n- ")
            fields = dict(line.split(": ", 1) for line in lines)
            for name in {"visit", "right_visit"} & fields.keys():
                fields[name] = int(fields[name])
            beat = Beat(says.replace("\n", " "), **fields)
            for id in ids.split(", "):
                beats.setdefault(id, []).append(beat)
    return beats


BEATS = read(Path(__file__).with_name("beats.txt").read_text(encoding="utf-8"))


def facts(recording):
    """Return the numbers in sentences that depend on d: elements of a shard, bytes of half an all-reduce, of both."""
    d = recording["ranks"]
    numel = sum(recording["params"])
    half_bytes = 4 * numel * (d - 1) // d
    return {"shard": NUMBER_WORDS[numel // d], "half": half_bytes, "both": 2 * half_bytes}


def visits(recording, code):
    """Return a Visit for each time that rank 0 has executed a line with `code`: its frame is the last at the line.

    The two halves of an all-reduce end in two frames at the same line: that line has a Visit for each half.
    """
    first_halves = [operation["end"] for operation in recording["operations"]
                    if operation["kind"] == "reduce-scatter" and operation["whole"] == "all-reduce"]
    result = []
    place_before = None
    for number, frame in enumerate(recording["frames"]):
        stacks = dict(frame["at"])
        if 0 not in stacks:  # rank 0 waits
            continue
        place = stacks[0][-1]
        visit = Visit(number, *place)
        if code in lines_of(recording, visit.function)[visit.line - 1]:
            if place == place_before and result[-1].frame not in first_halves:
                result.pop()
            result.append(visit)
        place_before = place
    if not result:
        raise ValueError(f"rank 0 executes no line with {code!r}")
    return result


def lines_of(recording, function):
    """Return the lines of the file that a function is in."""
    _, file, *_ = recording["functions"][function]
    _, source = recording["files"][file]
    return source.splitlines()


def resolved(id, recording, right=None):
    """Return {says, caption, frame, function, lines, look} of each beat of a program, as the page reads beats.

    right: the recording that is shown beside this one, if any. A beat then has the frame of `right` under "right", too.
    """
    return [resolved_beat(beat, recording, right) for beat in BEATS.get(id, [])]


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
        code = beat.right or beat.code
        visit_number = beat.right_visit if beat.right else beat.visit
        resolved["right"] = visits(right, code)[visit_number].frame
    return resolved


def edit_of(program, recording, right):
    """Return the edit of a program (show/record.py) as a diff: file, first line, lines removed, number of lines added.

    file: an index in recording["files"]. right: the recording of the program without the edit.
    """
    file, before, after = program.edit
    file_number = [name for name, _ in recording["files"]].index(file)
    _, original = right["files"][file_number]
    first = original[: original.index(before)].count("\n") + 1
    return {"file": file_number, "line": first, "gone": before.splitlines(), "come": len(after.splitlines())}
