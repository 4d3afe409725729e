"""Refuses `pip install .`, which would install nothing that can be imported: `pip install '.[test]'` is for extras."""

import os
from pathlib import Path

from setuptools import setup

# A build isn't told whether pip was asked for extras: pip's own command line says so, where there is a /proc.
COMMAND = Path(f"/proc/{os.getppid()}/cmdline")

if COMMAND.exists() and b"[" not in COMMAND.read_bytes():
    raise SystemExit("this repository is no package: `make take STAGE=4 TO=path` writes one, for pip install ./path")
setup()
