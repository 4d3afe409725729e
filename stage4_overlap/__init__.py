"""Exports the core, `ShardedOptimizer`, and the class to rely on, `DistributedOptimizer`: the core with its checks.

The checks are in guard/, a folder beside this one. Without guard/ the core can be used alone.
"""

from typing import TYPE_CHECKING

from .optimizer import ShardedOptimizer as ShardedOptimizer

if TYPE_CHECKING:
    from .distributed import DistributedOptimizer as DistributedOptimizer

__version__ = "0.4.0"


def __getattr__(name):
    """Import DistributedOptimizer when it is first used. Python calls this for a name that the module doesn't have."""
    if name != "DistributedOptimizer":
        raise AttributeError(name)
    try:
        from .distributed import DistributedOptimizer
    except ModuleNotFoundError as missing:
        if missing.name.split(".")[0] != "guard":
            raise
        raise ImportError(f"DistributedOptimizer needs guard/ beside {__name__}/, see make take") from None
    return DistributedOptimizer
