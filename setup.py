"""Refuses `pip install .`, which would install nothing that Python can import.

`pip install '.[test]'` is not refused. It installs the other packages that the extra "test" of pyproject.toml lists.
"""

import os
from pathlib import Path

from setuptools import setup

# pip runs this file to build the repository, and doesn't say whether its user asked for extras. But this process is
# pip's child, so on Linux the parent's command line can be read: it has a [ if the user asked for extras.
COMMAND = Path(f"/proc/{os.getppid()}/cmdline")

if COMMAND.exists() and b"[" not in COMMAND.read_bytes():
    raise SystemExit("this repository is no package: `make take STAGE=4 TO=path` writes one, for pip install ./path")
setup()
