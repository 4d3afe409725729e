"""Reads the sentences of the page docs/watch.html from show/beats.txt, and finds the moment that each is about.

The page plays recordings. A recording (show/frames.py) is what several ranks did in a program, a short training with
one optimizer. It is a list of frames. In a frame each rank executes one line of the optimizer's source, or waits. A
beat is a sentence with the line of rank 0 after which the page shows the sentence. Pictures in the chapters
(show/scenes.py) have captions: the parts of sentences that are in brackets.
"""

import re
from pathlib import Path
from typing import NamedTuple


class Beat(NamedTuple):
    """A paragraph of show/beats.txt: a sentence, and when the page shows it."""
    says: str
    code: str  # a part of the line after which the sentence is shown
    visit: int = 0  # which execution of the line is meant, counted from 0; -1: the last
    also: str = ""  # a part of another line in the same function, which the page marks, too
    look: str = ""  # the name of the row of memory that the sentence is about
    # Another recording may be shown beside. If its line for the sentence isn't `code`, these name it:
    right: str = ""  # a part of the line
    right_visit: int = 0  # which execution of the line


class Visit(NamedTuple):
    """One execution of a line by rank 0."""
    frame: int  # the number of the frame in which the line ends
    function: int  # an index in recording["functions"]
    line: int  # the number of the line in its file


# Sentences say in a word how many elements a shard has: the part of the parameters that a rank updates.
NUMBER_WORDS = "none one two three four five six seven eight".split()


def read(text):
    """Return {id of a program: list of its Beats}. text: what show/beats.txt contains.

    A section begins with the ids of programs, such as "## idea, idea-2". Each of these programs gets its paragraphs as
    beats. After the sentence a paragraph has lines such as "- visit: 1" for other fields of a Beat.
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
    """Return {name in braces in a sentence: what is put there}.

    shard: how many elements a rank updates, as a word. half: how many bytes a rank sends in one half of an all-reduce.
    both: how many bytes it sends in both halves.
    """
    d = recording["ranks"]
    numel = sum(recording["params"])
    half_bytes = 4 * numel * (d - 1) // d
    return {"shard": NUMBER_WORDS[numel // d], "half": half_bytes, "both": 2 * half_bytes}


def visits(recording, code):
    """Return a Visit for each time that rank 0 has executed a line that contains `code`.

    If rank 0 stays at the line for several frames, the Visit has the last of these frames. A line that calls an
    all-reduce gives two Visits: the first ends when the reduce-scatter, its first half, has arrived.
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
    _, file, *_ = recording["functions"][function]  # [name, file, first line, last line, docstring]
    _, source = recording["files"][file]  # [name, source]
    return source.splitlines()


def resolved(id, recording, right=None):
    """Return what resolved_beat returns for each beat of a program.

    id, recording: of the program. right: the recording that is shown beside, or None.
    """
    return [resolved_beat(beat, recording, right) for beat in BEATS.get(id, [])]


def resolved_beat(beat, recording, right):
    """Return {says, caption, frame, function, lines, look} of a beat, as the page reads it.

    lines: the numbers of the lines that the page marks. The others are as in Beat and Visit. If `right` is a recording,
    there is "right", too: the frame of the beat there.
    """
    says = beat.says.format(**facts(recording))
    caption = " ".join(re.findall(r"\[(.*?)\]", says)).rstrip(".")
    visit = visits(recording, beat.code)[beat.visit]
    name, file, first, last, docstring = recording["functions"][visit.function]
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
    """Return {file, line, gone, come}: the edit of a program, as the page reads it.

    A program with an edit has a bug: in one file the text `before` is replaced by `after`, see Edit in show/record.py.
    file: an index in recording["files"]. line: where the edit begins. gone: the lines that are removed. come: how many
    lines come in their place. right: the recording of the program without the edit.
    """
    file, before, after = program.edit
    file_number = [name for name, _ in recording["files"]].index(file)
    _, original = right["files"][file_number]
    first = original[: original.index(before)].count("\n") + 1
    return {"file": file_number, "line": first, "gone": before.splitlines(), "come": len(after.splitlines())}
