"""Watch one training step, line by line, on every rank: in the terminal, or as the page that plays (docs/watch.html).

    make show STAGE=3                the core of a stage; 0: replicated training; mine: a package of make exercise
    make show HTML=1                 docs/watch.html and the figures of the chapters, anew

The ranks are four processes, and the core is the stage's own, recorded from outside. Files are written only with
--pages. Exit code: 0; 1 when a rank fails.
"""

import sys

from harness.ranks import command_line


def options():
    parser = command_line.Parser("show", __doc__)
    parser.add_argument("stage", nargs="?", default="4", help="0 to 4, or a package (default 4)")
    parser.add_argument("--pages", action="store_true", help="write docs/watch.html and the figures")
    return parser.parse_args()


def main():
    command_line.begin()
    args = options()
    # A mistake is told before torch is loaded, which takes seconds.
    from harness.ranks.workers import WorkerError

    from . import page, terminal

    try:
        if args.pages:
            page.write_all()
        else:
            terminal.record_and_play(args.stage)
    except WorkerError as error:
        sys.exit(f"show: {error}\n{error.details}")


if __name__ == "__main__":
    main()
