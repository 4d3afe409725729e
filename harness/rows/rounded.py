"""What rows of variants that round something must agree with: everything on every rank, rounded alike."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.rows.training import MainParamsTraining, Training


def bf16_sum(_, bucket):
    """What torch's bf16_compress_hook does, which refuses gloo."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp_summed_in_bf16(model, adamw):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, bf16_sum)
    return Training(model, wrapped, torch.optim.AdamW(model.parameters(), **adamw))


class RoundedTraining(Training):
    """What wire16 and moments16 must agree with: everything on every rank, and what they round, rounded."""

    wire_dtype, sum_dtype, moments_dtype = torch.bfloat16, torch.float32, torch.float32

    def update(self):
        for param in self.model.parameters():
            grad = (param.grad.to(self.wire_dtype) / dist.get_world_size()).to(self.sum_dtype)
            dist.all_reduce(grad)
            param.grad = grad.float()
        self.optimizer.step()
        for state in self.optimizer.state.values():
            state.update({name: state[name].to(self.moments_dtype).float() for name in ("exp_avg", "exp_avg_sq")})


class RoundedMoments(RoundedTraining):
    wire_dtype, moments_dtype = torch.float32, torch.bfloat16


class SummedIn16Bits(RoundedTraining):
    """What DDP with bf16_compress_hook must agree with."""

    sum_dtype = torch.bfloat16


class RoundedTies(MainParamsTraining):
    """What remainder16 must agree with: a parameter is its main parameter rounded, at ties away from zero."""

    @torch.no_grad()
    def update(self):
        super().update()
        for param, main_param in zip(self.model.parameters(), self.main_params):
            param.view(torch.int16).copy_((main_param.view(torch.int32) + 2**15) >> 16)


def rounded_gradients(model, adamw):
    return RoundedTraining(model, model, torch.optim.AdamW(model.parameters(), **adamw))


def rounded_moments(model, adamw):
    return RoundedMoments(model, model, torch.optim.AdamW(model.parameters(), **adamw))


def summed_in_bf16(model, adamw):
    return SummedIn16Bits(model, model, torch.optim.AdamW(model.parameters(), **adamw))


def rounded_ties(model, adamw):
    return RoundedTies(model, adamw, dist.get_world_size())
