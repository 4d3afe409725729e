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
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only gets ? for a letter, not an error


def say_interrupted(kind, error, trace):
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
    add("--batch-size", type=COUNT, default=batch_size, help=f"sequences per rank (default {batch_size})")
    add("--sequence-length", type=COUNT, default=128, help="bytes per sequence (default 128)")


def fail(program, message):
    """End `program` because of what its user wrote: one line, exit code 2."""
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(2)


def check_length(length, model, models, fail):
    if length > models[model].block_size:
        fail(f"--sequence-length {length}: {model} takes at most {models[model].block_size}")


def check_writable(option, path, fail):
    """Make the folder of `path`, and `fail` before the measurement, not after it, where `path` can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        fail(f"{option} {path}: {error.strerror}")


def write(option, path, text, fail):
    """Replace what `path` holds by `text`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{option} {path}: not written: {error.strerror}")
