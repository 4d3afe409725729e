"""Watch one training step, line by line, on every rank: write a page that plays it, for a browser.

    make show STAGE=3                measured/show.html: a stage; 0: replicated training; mine: your own package
    make show HTML=1                 docs/watch.html, which has all stages, and the figures of the chapters, anew

The ranks are four processes. They run the stage's own optimizer, which is recorded from outside. Exit code: 0; 1 when a
rank fails.
"""

import sys

from harness.ranks import command_line


def main():
    command_line.begin()  # from here on Ctrl-C prints one word instead of a traceback
    parser = command_line.Parser("show", __doc__)
    parser.add_argument("stage", nargs="?", default="4", help="0 to 4, or a package (default 4)")
    parser.add_argument("--pages", action="store_true", help="write docs/watch.html and the figures")
    args = parser.parse_args()
    # Imported after the arguments are checked, because this loads torch, which takes seconds.
    from harness.ranks.workers import WorkerError

    from . import page

    try:
        if args.pages:
            page.write_all()
        else:
            # Ends the program with a message if the page couldn't be written, before anything is recorded.
            command_line.check_writable("the page", page.ALONE, parser.error)
            page.write_alone(args.stage)
    except WorkerError as error:  # a rank has failed; `details` has the tracebacks of the ranks
        sys.exit(f"show: {error}\n{error.details}")


if __name__ == "__main__":
    main()
