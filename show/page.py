"""The page that plays recordings: its parts, put into one file that needs nothing else."""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

PARTS = Path(__file__).parent / "page"
HELP = """
<p>Each beat shows a sentence, the lines of the core that do it, and what every rank holds afterwards: one column per
rank, one line of cells per shard. Cells that have changed since the beat before are outlined. A collective is one bar
across all ranks. <i>Line by line</i> is the zoom: the functions that run, each below its caller, with the ranks beside
the line that they are at.</p>
<p>Element e (from 1 on) has the gradient 100 r + e on rank r. Four ranks train 64 elements in eight tensors, with AdamW
at lr 1, whose first step moves each element by 1. Garbage is memory that nobody reads again before it is written. Bytes
are means over the ranks: what optimizer and model hold, without activations. A rank runs one line at a time, and a
message arrives where it is waited for.</p>
<p>Keys: <kbd>←</kbd> <kbd>→</kbd> beats, <kbd>↑</kbd> <kbd>↓</kbd> lines, <kbd>space</kbd> play or pause,
<kbd>Home</kbd> <kbd>End</kbd>; <kbd>Tab</kbd> to a rank's memory and <kbd>Enter</kbd> into its cells. On a phone:
swipe.</p>
"""


def page(recordings, stamp):
    """-> the text of the page. `recordings`: with id, short, beats and so on; `stamp`: see show/programs.py."""
    data = {"stamp": stamp, "help": HELP.strip(), "programs": recordings}
    packed = gzip.compress(json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(), mtime=0)
    text = (PARTS / "watch.html").read_text(encoding="utf-8")
    for kind in ("css", "js"):
        text = text.replace(f"/*{kind}*/", (PARTS / f"watch.{kind}").read_text(encoding="utf-8").strip())
    return text.replace("/*data*/", base64.b64encode(packed).decode())


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
