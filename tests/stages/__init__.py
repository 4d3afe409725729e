"""How a test of stages is written: its body under its name, though it runs on every rank."""

import contextlib
import functools
import importlib
import inspect


def on_ranks(test):
    """Makes of `test(rank, ...)` a test that calls it on each rank; after `rank` come fixtures and parameters."""
    _, *others = inspect.signature(test).parameters.values()

    @functools.wraps(test)
    def on_all(run, **kwargs):
        run(_on_a_rank, test.__module__, test.__name__, kwargs)

    run = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    on_all.__signature__ = inspect.Signature([run, *others])
    on_all.on_a_rank = test
    return on_all


def _on_a_rank(rank, module, name, kwargs):
    getattr(importlib.import_module(module), name).on_a_rank(rank, **kwargs)


@contextlib.contextmanager
def situation(name):
    """One of several in a test: an error says in which it came."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{name}: {error}") from error
