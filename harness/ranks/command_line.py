"""Does what every program does: end on Ctrl-C in one word, refuse bad input in one line, write a file."""

import argparse
import io
import math
import os
import sys
from pathlib import Path


def begin():
    """Make Ctrl-C one word, whenever it comes. A program calls this before it loads torch, which takes seconds."""
    sys.excepthook = say_interrupted
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of ASCII alone then shows ? in place of é


def say_interrupted(kind, error, trace):
    """Be an excepthook: after Ctrl-C print "interrupted", on rank 0 alone, and end with exit code 130."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    if os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr)
    sys.exit(130)


class Parser(argparse.ArgumentParser):
    """Parses the options of a program, whose docstring is what --help says."""

    def __init__(self, program, description):
        super().__init__(program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(self.prog, message)


def add_json(parser, path):
    """Add --json, whose default is `path`."""
    parser.add_argument("--json", type=Path, default=Path(path), help="where the result is written")


def number(kind, least, most):
    """Return a type for argparse: an int or float (`kind`) from `least` to `most`; nan is refused."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            words = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {words} from {least:g} to {most:g}, not {text:.40}")
        return value
    return parse


COUNT = number(int, 1, 10**6)


def add_sizes(add, batch_size):
    """Add --batch-size and --sequence-length by `add`, the add_argument of a parser."""
    add("--batch-size", type=COUNT, default=batch_size, help=f"sequences per rank (default {batch_size})")
    add("--sequence-length", type=COUNT, default=128, help="bytes per sequence (default 128)")


def fail(program, message):
    """End `program` because of what its user wrote: one line, exit code 2."""
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(2)


def check_length(length, model, models, fail):
    """Call `fail` with a message where the model of that name takes no sequences of this length."""
    if length > models[model].block_size:
        fail(f"--sequence-length {length}: {model} takes at most {models[model].block_size}")


def check_writable(option, path, fail):
    """Make the folder of `path`, and call `fail` if `path` can't be written: before an hour of measuring, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        fail(f"{option} {path}: {error.strerror}")


def write(option, path, text, fail):
    """Write `text` to the file at `path`, or call `fail` with a message."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{option} {path}: not written: {error.strerror}")
