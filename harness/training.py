"""Runs a model and an optimizer in the loop of every train.py, in halves that can be measured."""

import contextlib

import torch
import torch.distributed as dist

UPDATE_BYTES = 7 * 4  # of a parameter in AdamW, fp32: read p, g, m, v, write p, m, v


class Training:
    """Runs a model and an optimizer in the loop of every train.py, in two halves so that memory can be read between.

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
        """Return a context in which gradients add up and aren't sent."""
        for owner in (self.forward, self.optimizer):
            if hasattr(owner, "no_sync"):
                return owner.no_sync()
        return contextlib.nullcontext()

    def step(self, batch):
        self.forward_backward(batch)
        self.update()
        self.zero_grad()

    def finish(self):
        """Wait for what the last step has left in flight: parameters, and kernels on the GPU."""
        for optimizer in getattr(self.optimizer, "optimizers", [self.optimizer]):  # a pair: see variants/muon_rows.py
            getattr(optimizer, "finish_param_sync", lambda: None)()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def full_params(self):
        """Return the list of parameters, whole, as they are on this rank. Collective, of DTensors."""
        self.finish()
        return [getattr(param, "full_tensor", lambda: param)().detach() for param in self.model.parameters()]


class MainParamsTraining(Training):
    """Steps fp32 copies of the parameters, the main parameters; fp32 parameters are stepped themselves.

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
