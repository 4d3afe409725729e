"""The page that plays recordings: its parts, put into one file that needs nothing else."""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

PARTS = Path(__file__).parent / "page"
HELP = """
<p>A beat is a sentence, the lines of the core that do it, and what every rank holds then: a column a rank, a line of
cells a shard. What has changed since the beat before is outlined. A collective is one bar over all ranks. <i>Line by
line</i> is the zoom: the functions that run, each below its caller, and beside a line the ranks that are at it.</p>
<p>Element e (from 1 on) has the gradient 100 r + e on rank r. Four ranks, 64 elements in eight tensors, AdamW with lr
1: its first step moves each element by 1. Garbage is what nobody reads again before it is written. Bytes are means over
the ranks, of what optimizer and model hold, without activations. A rank does one line at a time, and a message arrives
where it is waited for.</p>
<p>Keys: <kbd>←</kbd> <kbd>→</kbd> beats, <kbd>↑</kbd> <kbd>↓</kbd> lines, <kbd>space</kbd> play or pause,
<kbd>Home</kbd> <kbd>End</kbd>, <kbd>m</kbd> next message, <kbd>f</kbd> next function; <kbd>Tab</kbd> to a rank's memory
and <kbd>Enter</kbd> into its cells. On a phone: swipe.</p>
"""


def page(recordings, stamp):
    """-> the text of the page. `recordings`: with id, short, intro and so on; `stamp`: see show/programs.py."""
    data = {"stamp": stamp, "help": HELP.strip(), "programs": recordings}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    packed = base64.b64encode(gzip.compress(text, mtime=0)).decode()
    text = (PARTS / "watch.html").read_text(encoding="utf-8")
    for mark, part in (
        ("/*STYLE*/", (PARTS / "watch.css").read_text(encoding="utf-8")),
        ("/*SCRIPT*/", (PARTS / "watch.js").read_text(encoding="utf-8")),
        ("/*DATA*/", packed),
    ):
        head, tail = text.split(mark)
        text = head + part.strip() + tail
    return text


def data_of(text):
    """-> what a page holds, {stamp, help, programs}; and the text of the page without it."""
    head, packed, tail = re.split(r'(?<=id="data">)(.*?)(?=</script>)', text, maxsplit=1, flags=re.DOTALL)
    return json.loads(gzip.decompress(base64.b64decode(packed))), head + tail


def stamp_of(paths, root):
    """-> a hash of files, by which a page tells what it was made from."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
