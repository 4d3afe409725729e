"""What every program does: Ctrl-C in one word, what a user wrote refused in one line, and files written whole."""

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path


def begin():
    """Of a program, before it loads torch, which takes seconds: Ctrl-C is one word, whenever it comes."""
    sys.excepthook = say_interrupted
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only gets ? for a letter, not an error


def say_interrupted(kind, error, trace):
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print("interrupted", file=sys.stderr)
    sys.exit(130)


class Parser(argparse.ArgumentParser):
    """The options of a program, whose docstring is what --help says."""

    def __init__(self, program, description):
        super().__init__(program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(self.prog, message)


def add_json(parser, path):
    parser.add_argument("--json", type=Path, default=Path(path), help="where the result is written")


def add_sizes(add, batch_size):
    add("--batch-size", type=int, default=batch_size, help=f"sequences per rank (default {batch_size})")
    add("--sequence-length", type=int, default=128, help="bytes per sequence (default 128)")


def fail(program, message):
    """End `program` because of what its user wrote: one line, exit code 2."""
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(2)


def check_at_least_1(args, names, fail):
    for name in names:
        if not 1 <= getattr(args, name) <= 10**6:
            bound = "at least 1" if getattr(args, name) < 1 else "at most a million"
            fail(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be {bound}")


def check_bounds(args, bounds, fail):
    """`bounds`: name of an option -> the least and the most that it may be. What was not given is None; nan is wrong.
    """
    for name, (least, most) in bounds.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            fail(f"--{name.replace('_', '-')} {value:g}: it must be from {least:g} to {most:g}")


def check_workload(args, at_least_1, models, fail):
    """`fail` where one of these options is less than 1, or there is no such model, or not for such sequences."""
    check_at_least_1(args, ("batch_size", "sequence_length", *at_least_1), fail)
    if args.model not in models:
        fail(f"there is no model {args.model!r}: choose one of {', '.join(models)}")
    if args.sequence_length > models[args.model].block_size:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {models[args.model].block_size}")


def check_writable(option, path, fail):
    """`fail` now, and not after the measurement, where `path` can't be written. Makes the folder that it is in."""
    if not path.name:
        fail(f"{option} '': it names no file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.partial").exists()  # that name, see write, may be too long
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # a loop of links leads nowhere
    except OSError as error:
        fail(f"{option} {path}: {error.strerror}: {error.filename}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        fail(f"{option} {path}: it {'is a folder' if path.is_dir() else 'may not be written'}")


def check_beside(option, path, suffix, fail):
    """As check_writable, also for the file that is written beside `path`, with `suffix`."""
    if path.suffix == suffix:
        fail(f"{option} {path}: another file of that name is written beside it: choose another ending")
    check_writable(option, path, fail)
    check_writable(option, path.with_suffix(suffix), fail)


def write(option, path, text, fail):
    """Puts `text` in the place of what `path` holds when all of it is written: on a full disk the old text stays."""
    is_file = path.is_file() or not path.exists()  # or else /dev/stdout
    path = path.resolve() if is_file else path  # a link stays one
    is_aside = is_file and os.access(path.parent, os.W_OK)
    beside = path.with_name(f"{path.name}.partial") if is_aside else path
    try:
        beside.write_text(text, encoding="utf-8")
        if is_aside:
            beside.replace(path)
    except OSError as error:
        if is_aside:
            beside.unlink(missing_ok=True)
        fail(f"{option} {path}: not written: {error.strerror}")


def write_and_show(path, text, fail, show):
    """Writes a result to --json, if there is a path, and then calls `show`, where the disk is full, too.

    Not the other way round: whom it is shown to may have gone (| head), or take ASCII only.
    """
    try:
        if path:
            write("--json", path, text, fail)
    finally:
        show()
    if path:
        print(f"written to {path}")  # not by rich, for which [a] in a path is markup
