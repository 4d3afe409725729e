"""Watch one training step, line by line, on every rank: in the terminal, or as the page that plays (docs/watch.html).

    make show STAGE=3                the core of a stage; 0: replicated training; mine: a package of yours
    make show HTML=1                 docs/watch.html and the figures of the chapters, anew

The ranks are processes, and the core is the stage's own, recorded from outside. Files are written only with --json or
--pages. Exit code: 0; 1 when a rank fails; 2 when there is nothing to show.
"""

import contextlib
import functools
import importlib.util
import json
import sys
from pathlib import Path

from harness.ranks import command_line

if __name__ == "__main__":
    command_line.begin()

from harness.ranks.command_line import number
from harness.ranks.workers import WorkerError, Workers

from . import frames, page, record, scenes, terminal
from .picture import THEMES

fail = functools.partial(command_line.fail, "show")
STAGES = {shown.id: shown for shown in page.SHOWN if shown.id.isdecimal()}
MAX_ELEMENTS = 48  # of all parameters: more would not fit the picture


def package_of(stage):
    """Return the package of a stage's number, or else `stage`, which may be a path."""
    package = STAGES[stage].program.package if stage in STAGES else stage.removesuffix("/").replace("/", ".")
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(package):
            return package
    return fail(f"STAGE={stage}: there are stages {min(STAGES)} to {max(STAGES)}, and no package {package} here")


def parse_args():
    parser = command_line.Parser("show", __doc__)
    add = parser.add_argument
    add("stage", nargs="?", default="4", help=f"{min(STAGES)} to {max(STAGES)}, or a package (default 4)")
    add("--ranks", type=number(int, 1, 8), default=4, help="processes (default 4)")
    add("--params", default="5,2,9", help="elements of each parameter (default 5,2,9)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the parameters")
    add("--optimizer", choices=list(record.OPTIMIZERS), default="adamw", help="default: AdamW, as on the page")
    add("--buckets", type=number(int, 1, MAX_ELEMENTS), default=3, help="of stage 4, by the nearest cap (default 3)")
    add("--steps", type=number(int, 1, 4), default=1, help="default 1")
    add("--json", type=Path, help="write the recording")
    add("--pages", action="store_true", help="write docs/watch.html and the figures, whatever else is said")
    args = parser.parse_args()
    sizes = [int(size) if size.strip().isdecimal() else 0 for size in args.params.split(",")]
    if min(sizes) < 1 or sum(sizes) > MAX_ELEMENTS:
        fail(f"--params {args.params}: it must be like 5,2,9, each at least 1, and at most {MAX_ELEMENTS} in all")
    args.package = package_of(args.stage)
    args.params = tuple(sizes)
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    return args


def main():
    args = parse_args()
    if args.pages:
        return write_pages()
    program = record.Program(
        args.package, args.ranks, args.params, args.dtype, args.optimizer, args.buckets, args.steps)
    title = STAGES[args.stage].title if args.stage in STAGES else f"{args.package}."
    with Workers(args.ranks, timeout_s=300) as workers:
        recorded = frames.recording(workers.run(record.record_rank, program), program, title)
    if args.json:
        args.json.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")
    terminal.play(recorded)


def write_pages():
    """Write docs/watch.html, and the pictures of README.md and the chapters in two themes."""
    recordings = page.all_recordings()
    write("docs/watch.html", page.page(recordings))
    for name, picture in scenes.pictures({recording["id"]: recording for recording in recordings}).items():
        for theme in THEMES:
            write(f"results/{name}{theme}.svg", picture.svg(theme))


def write(name, text):
    (page.ROOT / name).write_text(text, encoding="utf-8")
    print(f"{name}: {len(text.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"show: {error}")
    except WorkerError as error:
        sys.exit(f"show: {error}\n{error.details}")
