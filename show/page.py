"""The page that plays recordings: its parts, put into one file that needs nothing else."""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

PARTS = Path(__file__).parent / "page"


def page(recordings, stamp):
    """-> the text of the page. `recordings`: with id, short, beats and so on; `stamp`: see show/programs.py."""
    data = {"stamp": stamp, "programs": recordings}
    packed = gzip.compress(json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(), mtime=0)
    text = (PARTS / "watch.html").read_text(encoding="utf-8")
    for kind in ("css", "js"):
        text = text.replace(f"/*{kind}*/", (PARTS / f"watch.{kind}").read_text(encoding="utf-8").strip())
    return text.replace("/*data*/", base64.b64encode(packed).decode())


def data_of(text):
    """-> what a page holds, {stamp, programs}; and the text of the page without it."""
    head, packed, tail = re.split(r'(?<=id="data">)(.*?)(?=</script>)', text, maxsplit=1, flags=re.DOTALL)
    return json.loads(gzip.decompress(base64.b64decode(packed))), head + tail


def stamp_of(paths, root):
    """-> a hash of files, by which a page tells what it was made from."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
