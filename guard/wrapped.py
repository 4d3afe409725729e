"""Lightning, Fabric, and others that wrap the optimizer in an object that looks the same.

Their wrappers are instances of a class that is made at run time, of the wrapper's class and of ours: methods of ours
would run with the wrapper as `self`. What they assign would stay in the wrapper, and `self.optimizer` is there the
optimizer that is wrapped, not the inner one. Shown by tests/stages/test_wrappers.py.
"""

import weakref

import torch


class SeenThroughWrappers:
    def __new__(cls, *args, **kwargs):
        for kind in cls.__mro__:
            for name, value in list(vars(kind).items()):
                if isinstance(value, OfTheOptimizer):  # it is built like any optimizer: the other base is no wrapper
                    delattr(kind, name)
        optimizer = super().__new__(cls)
        optimizer._itself = weakref.ref(optimizer)  # wrappers hand attributes on, or copy them
        return optimizer

    def __init_subclass__(cls, **kwargs):
        """Where ours stands behind another base, `cls` may be a wrapper's: what it has of ours is the optimizer's."""
        super().__init_subclass__(**kwargs)
        for ours in cls.__bases__[1:]:
            if issubclass(ours, SeenThroughWrappers) and issubclass(ours, torch.optim.Optimizer):
                for name in dir(ours):
                    if not name.startswith("__") and getattr(cls, name) is getattr(ours, name):
                        setattr(cls, name, OfTheOptimizer(ours, name))


class OfTheOptimizer:
    """An attribute of a wrapper: that of the optimizer itself."""

    def __init__(self, ours, name):
        self.ours, self.name = ours, name

    def __get__(self, wrapper, _=None):
        return getattr(self.ours if wrapper is None else wrapper._itself(), self.name)

    def __set__(self, wrapper, value):
        setattr(wrapper._itself(), self.name, value)
