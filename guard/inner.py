"""Keeps main parameters and their gradients where they are, whatever an optimizer class does with them in a step.

Situation: an optimizer class of one's own. Its step assigns `p.grad` or `p.grad.data`, frees gradients, ends with
zero_grad(), or assigns `p.data` in place of writing into `p`. With plain tensors such a class trains. In stages 3 and 4
it steps views: of the buffer that is sent, and of the buffer in which gradients arrive. So after its step, what it has
left in its parameters is copied to where it is sent from, and each parameter has its gradient again. Shown by
tests/stages/test_own_classes.py, `test_a_class_of_ones_own_trains_as_in_plain_torch`.
"""

import contextlib

import torch

from .groups import all_params
from .hooks import replaced_step


class InnerTensors:
    """What the inner optimizer steps in stages 3 and 4. In stages 1 and 2 it has the model's own tensors: none.

    Attributes:
        views: id of a main parameter, or of its gradient -> another view of the same memory, out of a class's reach.
    """

    def __init__(self):
        self.views = {}

    def add(self, main, grad):
        self.views |= {id(tensor): tensor.detach() for tensor in (main, grad)}

    @contextlib.contextmanager
    def kept(self, optimizer):
        """Within this context, each step of `optimizer` leaves its tensors where they are."""
        step = optimizer.step

        def step_and_keep(*args):
            main_params = all_params(optimizer)
            grads = [main.grad for main in main_params]
            step(*args)
            self.keep(main_params, grads)

        with replaced_step(optimizer, step_and_keep) if self.views else contextlib.nullcontext():
            yield

    def keep(self, main_params, grads):
        """Give each tensor its memory again, with what a parameter has now, and each parameter its gradient."""
        tensors = main_params + [grad for grad in grads if grad is not None]
        views = list(map(self.views.get, map(id, tensors)))  # `map`: Python calls nothing for each parameter
        if addresses(tensors) != addresses(views):
            for main, view in zip(main_params, views):
                if main.data_ptr() != view.data_ptr():
                    view.copy_(main)
            for tensor, view in zip(tensors, views):
                tensor.data = view
        for main, grad in zip(main_params, grads):
            if main.grad is not grad:
                main.grad = grad


def share_attributes(groups, own_groups, param_of):
    """Give each main parameter the attributes of its parameter, and its name: an inner optimizer may read p.lr_mul.

    Both share one dict of attributes, so what is set later counts too.

    Args:
        groups, own_groups: of the model's parameters, and the same of main parameters.
        param_of: main parameter -> parameter.
    """
    for group, own_group in zip(groups, own_groups):
        for main in own_group["params"]:
            if type(main) is torch.Tensor:  # a FakeTensor has its device in that dict
                main.__dict__ = param_of[main].__dict__
        if "param_names" in group:
            name_of = dict(zip(group["params"], group["param_names"]))
            own_group["param_names"] = [name_of[param_of[main]] for main in own_group["params"]]


def addresses(tensors):
    return list(map(torch.Tensor.data_ptr, tensors))
