"""Does what every program does: end on Ctrl-C in one word, refuse bad input in one line, write files whole."""

import argparse
import io
import math
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
    """Return a type for argparse: an int or float from `least` to `most`; nan is refused."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a {'whole ' if kind is int else ''}number from {least:g} to "
                                             f"{most:g}, not {text:.40}")
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


def partial_path(path):
    """Return the file that is written before it replaces `path`, which stays on a full disk. A link stays a link, and
    what is no file, such as /dev/stdout, is written itself."""
    if path.exists() and not path.is_file():
        return path
    path = path.resolve()
    return path.with_name(f"{path.name}.partial")


def check_writable(option, path, fail):
    """Make the folder of `path`, and `fail` before the measurement, not after it, where `path` can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (partial := partial_path(path)).open("a").close()
        if partial != path:
            partial.unlink(missing_ok=True)  # another rank may have been here
    except (OSError, RuntimeError) as error:  # the latter, of a loop of links, before Python 3.13
        fail(f"{option} {path}: {getattr(error, 'strerror', None) or error}")


def write(option, path, text, fail):
    """Replace what `path` holds by `text`."""
    partial = partial_path(path)
    try:
        partial.write_text(text, encoding="utf-8")
        if partial != path:
            partial.replace(path.resolve())
    except OSError as error:
        if partial != path:
            partial.unlink(missing_ok=True)
        fail(f"{option} {path}: not written: {error.strerror}")


def write_and_show(path, text, fail, show):
    """Write a result to --json, if there is a path, and then `show` it: its reader may be gone, or take ASCII only."""
    try:
        if path:
            write("--json", path, text, fail)
    finally:
        show()
    if path:
        print(f"written to {path}")  # not by rich, for which [a] in a path is markup
