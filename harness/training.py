"""A model and an optimizer in the loop that every train.py runs, in halves that can be measured."""

import contextlib

import torch
import torch.distributed as dist


class Training:
    """A model and an optimizer in the loop that every train.py runs, in two halves so that memory can be read between.

    `forward` is called with (tokens, targets) and returns the loss: the model, or what is wrapped around it.
    """

    def __init__(self, model, forward, optimizer):
        self.model, self.forward, self.optimizer = model, forward, optimizer

    def forward_backward(self, batch):
        tokens, targets = batch  # (B, T) int64, (B, T) int64
        self.forward(tokens, targets).backward()

    def update(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def no_sync(self):
        """A context in which gradients add up, and don't travel."""
        owner = next((one for one in (self.forward, self.optimizer) if hasattr(one, "no_sync")), None)
        return owner.no_sync() if owner else contextlib.nullcontext()

    def step(self, batch):
        self.forward_backward(batch)
        self.update()
        self.zero_grad()

    def finish(self):
        """Waits for all that the last step has left under way: parameters that still travel, kernels on the GPU."""
        if hasattr(self.optimizer, "finish_param_sync"):
            self.optimizer.finish_param_sync()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def full_params(self):
        """Every parameter, whole, as it is on this rank -> list of tensors."""
        self.finish()
        return [param.detach() for param in self.model.parameters()]


class MainParamsTraining(Training):
    """16-bit parameters whose fp32 copies, the main parameters, are stepped. `world_size` 1: without communication.

    `divided_in`, `summed_in`: the dtypes in which gradients are averaged; None is that of the parameters.
    """

    def __init__(self, model, adamw, world_size, divided_in=None, summed_in=torch.float32):
        self.main_params = [param.detach().float() for param in model.parameters()]
        super().__init__(model, model, torch.optim.AdamW(self.main_params, **adamw))
        self.world_size, self.divided_in, self.summed_in = world_size, divided_in, summed_in

    def update(self):
        params = list(self.model.parameters())
        for param, main_param in zip(params, self.main_params):
            grad = (param.grad.to(self.divided_in or param.dtype) / self.world_size).to(self.summed_in or param.dtype)
            if self.world_size > 1:
                dist.all_reduce(grad)
            main_param.grad = grad.float()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, self.main_params)

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.model.zero_grad()


class ShardedTraining(Training):
    """For parameters that are DTensors."""

    def full_params(self):
        return [param.full_tensor().detach() for param in self.model.parameters()]
