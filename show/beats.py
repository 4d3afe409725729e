"""Reads the sentences of the page docs/watch.html from show/beats.txt, and finds the moment that each is about.

The page plays recordings. A recording (show/frames.py) is what several ranks did in a program: a short training with
one optimizer. It is a list of frames, and in a frame each rank executes one line of the optimizer's source, or waits. A
beat is a sentence with the line of rank 0 after which the page shows the sentence. Text in brackets in a sentence is a
caption, too, of the pictures in the chapters (show/scenes.py).
"""

import re
from pathlib import Path
from typing import NamedTuple


class Beat(NamedTuple):
    """A paragraph of show/beats.txt: a sentence, and the moment at which the page shows the sentence."""
    says: str
    code: str  # a part of the line after which the sentence is shown
    visit: int = 0  # which execution of the line is meant, counted from 0; -1: the last
    also: str = ""  # a part of another line in the same function, which the page marks, too
    look: str = ""  # the name of the row of memory that the sentence is about
    right: str = ""  # a part of the line in the recording that is shown beside, if that line isn't `code`
    right_visit: int = 0  # which execution of the line `right`


class Visit(NamedTuple):
    """One execution of a line by rank 0."""
    frame: int  # the number of the frame in which the line ends
    function: int  # an index in recording["functions"]
    line: int  # the number of the line in its file


# Sentences have the number of elements of a shard as a word.
NUMBER_WORDS = "none one two three four five six seven eight".split()


def read(text):
    """Return {id of a program: list of its Beats}. text: what show/beats.txt contains.

    A section begins with a heading like "## idea, idea-2", which has the ids of programs. Its paragraphs are the beats
    of each of these programs. After the sentence a paragraph has lines like "- visit: 1" for other fields of a Beat.
    """
    beats = {}
    _, *sections = text.split("\n## ")  # what stands before the first heading explains the file
    for section in sections:
        ids, _, paragraphs = section.partition("\n")
        for paragraph in paragraphs.strip().split("\n\n"):
            says, *lines = paragraph.split("\n- ")
            fields = dict(line.split(": ", 1) for line in lines)
            for name in {"visit", "right_visit"} & fields.keys():  # these are numbers
                fields[name] = int(fields[name])
            beat = Beat(says.replace("\n", " "), **fields)
            for id in ids.split(", "):
                beats.setdefault(id, []).append(beat)
    return beats


BEATS = read(Path(__file__).with_name("beats.txt").read_text(encoding="utf-8"))


def facts(recording):
    """Return {name in braces in a sentence: what is put there} for numbers that depend on the number of ranks.

    shard: elements that a rank updates, as a word. half: bytes that a rank sends in one half of an all-reduce. both:
    bytes that it sends in both halves.
    """
    d = recording["ranks"]
    numel = sum(recording["params"])
    half_bytes = 4 * numel * (d - 1) // d
    return {"shard": NUMBER_WORDS[numel // d], "half": half_bytes, "both": 2 * half_bytes}


def visits(recording, code):
    """Return a Visit for each time that rank 0 has executed a line with the text `code`.

    Rank 0 may stay at a line for several frames, of which the last counts. But in a line that calls an all-reduce the
    first half of the all-reduce is a Visit, too: it ends in the frame in which its reduce-scatter has arrived.
    """
    first_halves = [operation["end"] for operation in recording["operations"]
                    if operation["kind"] == "reduce-scatter" and operation["whole"] == "all-reduce"]
    result = []
    place_before = None  # [function, line] of rank 0 when it last moved
    for number, frame in enumerate(recording["frames"]):
        stacks = dict(frame["at"])  # {rank: [function, line] of each running function, outermost first}
        if 0 not in stacks:  # rank 0 waits
            continue
        place = stacks[0][-1]
        visit = Visit(number, *place)
        if code in lines_of(recording, visit.function)[visit.line - 1]:
            if place == place_before and result[-1].frame not in first_halves:
                result.pop()  # the same execution goes on
            result.append(visit)
        place_before = place
    if not result:
        raise ValueError(f"rank 0 executes no line with {code!r}")
    return result


def lines_of(recording, function):
    """Return the lines of the file that contains a function. function: an index in recording["functions"]."""
    _, file, *_ = recording["functions"][function]
    _, source = recording["files"][file]
    return source.splitlines()


def resolved(id, recording, right=None):
    """Return the beats of a program as the page reads them: see `resolved_beat`.

    id: of the program. recording: of the program. right: the recording that is shown beside `recording`, if any.
    """
    return [resolved_beat(beat, recording, right) for beat in BEATS.get(id, [])]


def resolved_beat(beat, recording, right):
    """Return {says, caption, frame, function, lines, look} of a beat, with the names of Beat and Visit.

    lines: the numbers of the lines that the page marks. If `right` isn't None, "right" is the frame of the beat there.
    """
    says = beat.says.format(**facts(recording))
    caption = " ".join(re.findall(r"\[(.*?)\]", says)).rstrip(".")
    visit = visits(recording, beat.code)[beat.visit]
    _, _, first, last, _ = recording["functions"][visit.function]
    source = lines_of(recording, visit.function)
    lines = [visit.line]
    if beat.also:
        lines.append(next(line for line in range(first, last + 1) if beat.also in source[line - 1]))
    entry = {"says": re.sub(r"[\[\]]", "", says), "caption": caption[:1].upper() + caption[1:],
             "frame": visit.frame, "function": visit.function, "lines": sorted(lines), "look": beat.look}
    if right:
        code = beat.right or beat.code
        visit_number = beat.right_visit if beat.right else beat.visit
        entry["right"] = visits(right, code)[visit_number].frame
    return entry


def edit_of(program, recording, right):
    """Return the edit of a program as the page reads it: {file, line, gone, come}.

    A program with an edit has a bug: in one file the text `before` is replaced by `after`, see Edit in show/record.py.
    file: an index in recording["files"]. line: where the edit begins. gone: the lines that are removed. come: how many
    lines replace them. right: the recording of the program without the edit.
    """
    file, before, after = program.edit
    file_number = [name for name, _ in recording["files"]].index(file)
    _, original = right["files"][file_number]
    first = original[: original.index(before)].count("\n") + 1
    return {"file": file_number, "line": first, "gone": before.splitlines(), "come": len(after.splitlines())}
