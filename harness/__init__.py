"""What measuring and training need and no stage may know."""

import os
import sys


def fail(program, message):
    """End `program` because of what its user wrote: one line, exit code 2."""
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(2)


def check_at_least_1(args, names, fail):
    for name in names:
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1")


def check_workload(args, at_least_1, models, fail):
    """`fail` where one of these options is less than 1, or there is no such model, or not for such sequences."""
    check_at_least_1(args, ("batch_size", "sequence_length", *at_least_1), fail)
    if args.model not in models:
        fail(f"there is no model {args.model!r}: choose one of {', '.join(models)}")
    if args.sequence_length > models[args.model].block_size:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {models[args.model].block_size}")


def check_writable(option, path, fail):
    """`fail` now, and not after the measurement, where `path` can't be written. Makes the folder that it is in."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{option} {path}: {error.strerror}: {error.filename}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        fail(f"{option} {path}: it {'is a folder' if path.is_dir() else 'may not be written'}")
