"""The page that plays recordings: its parts, put into one file that needs nothing else."""

import hashlib
import json
from pathlib import Path

PARTS = Path(__file__).parent / "page"
HELP = """
<p>On the left the functions that run now, each below the one that has called it; the numbers beside a line are the
ranks that are at it. On the right a column a rank, and in it all memory that the optimizer and the model hold, by name;
what is cut into shards has a line a shard. A value is written by the line that is marked in the same frame.</p>
<p>Element e (from 1 on) has the gradient 100 r + e on rank r; each rank has a batch of its own. Four ranks, SGD with
momentum 0.5 and lr 1. Garbage is what nobody reads again before it is written. A rank does one line a frame; a message
arrives where it is waited for.</p>
<p>Keys: <kbd>space</kbd> play or pause, <kbd>←</kbd> <kbd>→</kbd> a line back and on, <kbd>Home</kbd>
<kbd>End</kbd>, <kbd>m</kbd> next message, <kbd>f</kbd> next function; <kbd>Tab</kbd> to a rank's memory and
<kbd>Enter</kbd> into its cells. Hover over, tap or focus a cell to read what it is.</p>
"""


def page(recordings, stamp):
    """-> the text of the page. `recordings`: with id, short, intro and so on; `stamp`: see show/programs.py."""
    data = json.dumps(
        {"stamp": stamp, "help": HELP.strip(), "programs": recordings}, separators=(",", ":"), ensure_ascii=False
    )
    text = (PARTS / "watch.html").read_text(encoding="utf-8")
    for mark, part in (
        ("/*STYLE*/", (PARTS / "watch.css").read_text(encoding="utf-8")),
        ("/*SCRIPT*/", (PARTS / "watch.js").read_text(encoding="utf-8")),
        ("/*DATA*/", data.replace("<", "\\u003c")),
    ):
        head, tail = text.split(mark)
        text = head + part.strip() + tail
    return text


def stamp_of(paths, root):
    """-> a hash of files, by which a page tells what it was made from."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
