"""Does what every program needs: end on Ctrl-C with one word, refuse wrong options in one line, and write a file.

Some functions get an argument `refuse`: a function `refuse(message)` that prints a line and ends the program, so it
never returns. It is `error` of a program's Parser, for example, or `fail` below with the program's name bound.
"""

import argparse
import io
import math
import os
import sys
from pathlib import Path


def begin():
    """Let Ctrl-C, from now on, end this program with one word in place of a traceback.

    A program calls this before it loads torch, which takes seconds.
    """
    sys.excepthook = say_interrupted
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # so a terminal with only ASCII shows ? for é


def say_interrupted(kind, error, trace):
    """After Ctrl-C print "interrupted", on rank 0 only, and end the process with exit code 130, as shells do.

    This is a sys.excepthook: Python calls it with an error that nothing has caught, its class and its traceback. For
    any error but Ctrl-C's it prints the traceback, as Python does.
    """
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    if os.environ.get("RANK", "0") == "0":  # set by torchrun; a program without ranks hasn't got it
        print("interrupted", file=sys.stderr)
    sys.exit(130)


class Parser(argparse.ArgumentParser):
    """Parses the options of a program. `description`, mostly the docstring of its module, is what --help prints."""

    def __init__(self, program, description):
        super().__init__(program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):  # argparse calls this for a wrong option; programs call it for other mistakes
        fail(self.prog, message)


def add_json(parser, path):
    """Add the option --json, the file that the program writes, with `path` as its default."""
    parser.add_argument("--json", type=Path, default=Path(path), help="where the result is written")


def number(kind, least, most):
    """Return a `type` for an option of argparse: a number from `least` to `most`. `kind` is int or float."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # which is refused below, because it is not in any range
        if not least <= value <= most:
            words = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {words} from {least:g} to {most:g}, not {text:.40}")
        return value
    return parse


COUNT = number(int, 1, 10**6)


def add_sizes(add, batch_size):
    """Add the options --batch-size and --sequence-length. `add`: the method add_argument of a parser."""
    add("--batch-size", type=COUNT, default=batch_size, help=f"sequences per rank (default {batch_size})")
    add("--sequence-length", type=COUNT, default=128, help="bytes per sequence (default 128)")


def fail(program, message):
    """Print in one line what is wrong with the options of `program`, and end it with exit code 2."""
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(2)


def check_length(length, model, models, refuse):
    """Call `refuse` if the model named `model` can't take so long a sequence. `models`: {name: sizes of the model}."""
    if length > models[model].block_size:
        refuse(f"--sequence-length {length}: {model} takes at most {models[model].block_size}")


def check_writable(option, path, refuse):
    """Make the folder of `path`, and call `refuse` if the file `path`, which `option` names, can't be written.

    A program calls this before it measures for an hour, so that it doesn't fail afterwards.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()  # "a" makes an empty file, or leaves a file as it is
        if is_new:
            path.unlink()
    except OSError as error:
        refuse(f"{option} {path}: {error.strerror}")


def write(option, path, text, refuse):
    """Write `text` to the file `path`, which `option` names. If that isn't possible, call `refuse`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        refuse(f"{option} {path}: not written: {error.strerror}")
