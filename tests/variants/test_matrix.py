"""Every variant beside what users combine it with: each cell equals one process that trains on the data of all ranks.

Four ranks, which the hybrids take as two groups of two. A variant that can't do something says so in its first lines.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checkpoint
from tests.common import on_ranks, optimizer_of
from tests.variants import on_pairs
from variants import hybrid

HYBRIDS = ["tests.variants.on_pairs", "tests.variants.on_pairs_of_stage_3"]
OF_STAGE_3 = ["variants.per_parameter", "tests.variants.on_pairs_of_stage_3"]
FEWER_BITS = ["variants.wire16", "variants.moments16"]
VARIANTS = [*HYBRIDS, *FEWER_BITS, "variants.per_parameter", "variants.muon", "variants.finite", "variants.blocks",
            "variants.offload", "variants.remainder16"]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16,
          "mixed": torch.bfloat16}  # mixed: with a norm in fp32
SITUATIONS = ["unused by rank", "unused by group", "passes by group", "copy_", "data", "clip", "no_sync", "prefetch",
              "frozen", "group added", "other d"]
SGD = {"lr": 0.2, "momentum": 0.9}


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.to(DTYPES[dtype])
        if dtype == "mixed":
            self.norm.float()

    def loss(self, situation, rank, step, number):
        x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(100 * rank + 10 * step + number))
        x = self.first(x.to(self.first.weight.dtype))
        if not (situation == "unused by rank" and rank < 3 or situation == "unused by group" and rank < 2):
            x = self.late(x)
        return (self.norm(x.to(self.norm.weight.dtype)) - y).square().mean()


class OneProcess:
    """The reference: SGD of main parameters in fp32 at least, with gradients averaged over `ranks`."""

    def __init__(self, model, params):
        self.model = model
        self.mains = {param: param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
                      for param in model.parameters()}
        self.optimizer = torch.optim.SGD([self.mains[param] for param in params], **SGD)

    def backward(self, loss, n_ranks):
        params = [param for param in self.model.parameters() if param.requires_grad]
        for param, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True)):
            main = self.mains[param]
            if grad is not None:
                main.grad = grad.to(main.dtype) / n_ranks + (0 if main.grad is None else main.grad)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param, main in self.mains.items():
            param.data.copy_(main)


def built(variant, situation, params, **on_other_ranks):
    kwargs = dict(SGD, **on_other_ranks)
    if variant not in OF_STAGE_3:
        kwargs.update(bucket_cap_mb=1e-6, find_unused_parameters="unused" in situation)  # each parameter is a bucket
    return optimizer_of(variant)(params, torch.optim.SGD, **kwargs)


def write(param, situation):
    if situation == "copy_":
        with torch.no_grad():
            param.copy_(param.clamp(-0.1, 0.1))
    else:
        param.data.clamp_(-0.1, 0.1)
        if param.dtype.itemsize == 2:  # docs/reference.md: of 16-bit parameters fp32 copies are stepped
            torch.autograd.graph.increment_version(param)


def vector(model):
    return nn.utils.parameters_to_vector(param.detach().double() for param in model.parameters())


def n_passes(situation, rank):
    """-> how many backward passes there are per step."""
    if situation == "passes by group":
        return 2 if rank < 2 else 3
    return 1 + rank if situation == "no_sync" else 1


@pytest.mark.parametrize("variant", VARIANTS)
@on_ranks(4, dtype=DTYPES, situation=SITUATIONS)
def test_a_variant_beside_what_users_combine_it_with(rank, variant, dtype, situation, tmp_path):
    if situation == "passes by group" and variant not in HYBRIDS + OF_STAGE_3:
        return  # as in stage 4: all ranks run equally many backward passes, or accumulate in no_sync()
    model, same, ranks = Model(dtype), Model(dtype), range(4)
    start = vector(model)
    late = [model.late, same.late] if situation in ("frozen", "group added") else []
    params, others = ([param for name, param in one.named_parameters() if not late or "late" not in name]
                      if situation == "group added" else list(one.parameters()) for one in (model, same))
    optimizer, reference = built(variant, situation, params), OneProcess(same, others)
    if situation == "prefetch" and variant not in OF_STAGE_3:
        optimizer.prefetch_params(model)
    for step in range(4):
        for layer in late:
            layer.requires_grad_(step >= 2)
        if situation == "group added" and step == 2:
            optimizer.add_param_group({"params": model.late.parameters(), "lr": 0.1})
            mains = [reference.mains[param] for param in same.late.parameters()]
            reference.optimizer.add_param_group({"params": mains, "lr": 0.1})
        if situation == "other d" and step == 2:
            folder = tmp_path / f"{dtype}{rank.rank // 2 if variant in HYBRIDS else 0}"
            checkpoint.save(folder, model, optimizer).result()
            dist.barrier()
            model = Model(dtype)
            if variant in HYBRIDS:
                on = {"mesh": on_pairs.mesh_of(1)}
            else:  # in each half the same data
                on = {"process_group": on_pairs.mesh_of(2).get_group(1)}
                ranks = range(2)
            optimizer = built(variant, situation, model.parameters(), **on)
            checkpoint.load(folder, model, optimizer)
        mine = rank.rank % len(ranks)
        for number in range(last := n_passes(situation, mine)):
            with optimizer.no_sync() if situation == "no_sync" and number + 1 < last else contextlib.nullcontext():
                model.loss(situation, mine, step, number).backward()
        for each in ranks:
            for number in range(n_passes(situation, each)):
                reference.backward(same.loss(situation, each, step, number), len(ranks))
        if situation == "clip":
            norm = nn.utils.clip_grad_norm_(reference.mains.values(), 0.5).item()
            assert optimizer.clip_grad_norm_(0.5).item() == pytest.approx(norm, rel=1e-2) and norm > 0.5
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        if situation in ("copy_", "data"):
            for param, other in zip(model.parameters(), same.parameters()):
                for each in (param, other):
                    write(each, situation)
                main = reference.mains[other]
                main.copy_(torch.where(main.to(other.dtype) == other, main, other))
    flat = vector(model)
    everyone = flat.new_empty(4, len(flat))
    dist.all_gather_into_tensor(everyone.view(-1), flat)
    assert (everyone == flat).all(), "the ranks have different parameters"
    tolerance = 2e-2 if DTYPES[dtype].itemsize == 2 or variant in FEWER_BITS else 1e-5
    for (name, param), other in zip(model.named_parameters(), same.parameters()):
        torch.testing.assert_close(param, other, rtol=tolerance, atol=tolerance / 4, msg=lambda text: f"{name}: {text}")
    assert (flat - start).abs().max() > 5 * tolerance, "this shows nothing: the parameters have hardly moved"
