"""Ctrl-C, SIGTERM, and the end of a parent: each ends a program in one word, or quietly."""

import ctypes
import signal
import sys


def say_interrupted(kind, error, trace):
    """Ctrl-C ends every program of the harness with one word, whenever it comes: while it still loads torch, too."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print("interrupted", file=sys.stderr)
    sys.exit(130)


sys.excepthook = say_interrupted


def end_with_parent():
    """In a child: ask Linux for a SIGTERM when the parent dies, even of SIGKILL. torchrun then ends its ranks."""
    PR_SET_PDEATHSIG = 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def exit_on_signals():
    """SIGTERM and SIGHUP end this process as Ctrl-C does: what it has started and made is put away."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
