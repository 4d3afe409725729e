"""The core, `ShardedOptimizer`, and with guard/ beside this directory the class to rely on, `DistributedOptimizer`."""

from typing import TYPE_CHECKING

from .optimizer import ShardedOptimizer as ShardedOptimizer

if TYPE_CHECKING:
    from .distributed import DistributedOptimizer as DistributedOptimizer

__version__ = "0.4.0"


def __getattr__(name):
    if name != "DistributedOptimizer":
        raise AttributeError(name)
    try:
        from .distributed import DistributedOptimizer
    except ModuleNotFoundError as missing:
        if missing.name.split(".")[0] != "guard":
            raise
        raise ImportError(f"DistributedOptimizer needs guard/ beside {__name__}/, see make take") from None
    return DistributedOptimizer
