"""A model and an optimizer in the loop that every train.py runs, in halves that can be measured."""

import contextlib

import torch
import torch.distributed as dist

UPDATE_BYTES = 7 * 4  # of a parameter in AdamW, fp32: read p, g, m, v, write p, m, v


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
        for optimizer in getattr(self.optimizer, "optimizers", [self.optimizer]):  # a pair: see muon.py
            getattr(optimizer, "finish_param_sync", lambda: None)()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def full_params(self):
        """Every parameter, whole, as it is on this rank -> list of tensors."""
        self.finish()
        return [param.detach() for param in self.model.parameters()]


class MainParamsTraining(Training):
    """Parameters whose fp32 copies, the main parameters, are stepped; of fp32 they are no copies.

    Args:
        world_size: 1 is without communication.
        divided_in, summed_in: the dtypes in which gradients are averaged; None is that of the parameters.
        moments_in: the dtype that AdamW's moments are rounded to.
        ties_away: a parameter is its main parameter rounded, at ties away from zero, as in variants/remainder16.py.
    """

    def __init__(self, model, adamw, world_size, divided_in=None, summed_in=torch.float32, moments_in=None,
                 ties_away=False):
        self.main_params = [param.detach().float() for param in model.parameters()]
        super().__init__(model, model, torch.optim.AdamW(self.main_params, **adamw))
        self.world_size, self.divided_in, self.summed_in = world_size, divided_in, summed_in
        self.moments_in, self.ties_away = moments_in, ties_away

    @torch.no_grad()
    def update(self):
        params = list(self.model.parameters())
        for param, main_param in zip(params, self.main_params):
            grad = (param.grad.to(self.divided_in or param.dtype) / self.world_size).to(self.summed_in or param.dtype)
            if self.world_size > 1:
                dist.all_reduce(grad)
            main_param.grad = grad.float()
        self.optimizer.step()
        for state in self.optimizer.state.values() if self.moments_in else ():
            state.update({name: state[name].to(self.moments_in).float() for name in ("exp_avg", "exp_avg_sq")})
        torch._foreach_copy_(params, self.main_params)
        for param, main_param in zip(params, self.main_params) if self.ties_away else ():
            param.view(torch.int16).copy_((main_param.view(torch.int32) + 2**15) >> 16)

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.model.zero_grad()


class ShardedTraining(Training):
    """For parameters that are DTensors."""

    def full_params(self):
        return [param.full_tensor().detach() for param in self.model.parameters()]
