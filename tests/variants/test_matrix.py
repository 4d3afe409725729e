"""Every variant beside what users combine it with equals one process that has the data of all ranks.

Four ranks, which the hybrids take as two groups of two. What a variant doesn't take stands in its first lines.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checkpoint
from tests.common import no_sync_if, on_ranks, optimizer_of
from tests.variants import on_pairs

HYBRID = "tests.variants.on_pairs"
OF_STAGE_3 = "variants.per_parameter"
FEWER_BITS = ["variants.wire16", "variants.moments16"]
OTHERS = ["variants.muon", "variants.finite", "variants.blocks", "variants.offload", "variants.remainder16"]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16,
          "mixed": torch.bfloat16}  # mixed: with layers in fp32
SITUATIONS = ["unused by rank", "unused by group", "passes by group", "copy_", "data", "clip", "no_sync", "prefetch",
              "frozen", "group added", "other d"]
CASES = [(dtype, situation) for number, situation in enumerate(SITUATIONS)
         for dtype in (["fp32", "fp64", "fp16"] if number % 2 else ["fp32", "bf16", "mixed"])]
SGD = {"lr": 0.2, "momentum": 0.9}


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.late, self.first = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        for layer in (self.norm, self.late, self.first):
            layer.to(torch.float32 if dtype == "mixed" and layer is not self.first else DTYPES[dtype])

    def losses(self, situation, rank, step):
        """-> iterator over the loss of each backward pass of a rank in one step."""
        for number in range({"passes by group": 2 if rank < 2 else 3, "no_sync": 1 + rank}.get(situation, 1)):
            x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(100 * rank + 10 * step + number))
            x = self.first(x.to(self.first.weight.dtype))
            if rank >= {"unused by rank": 3, "unused by group": 2}.get(situation, 0):
                x = self.late(x.to(self.late.weight.dtype))
            yield (self.norm(x.to(self.norm.weight.dtype)) - y).square().mean()


def write(param, situation):
    (param.detach() if situation == "copy_" else param.data).clamp_(-0.1, 0.1)
    if situation == "data" and param.itemsize == 2:  # docs/reference.md: of 16-bit parameters fp32 copies are stepped
        torch.autograd.graph.increment_version(param)


def vector(model):
    return nn.utils.parameters_to_vector(param.detach().double() for param in model.parameters())


def first_of(model, situation):
    """-> the parameters that an optimizer is made with."""
    return [param for name, param in model.named_parameters() if situation != "group added" or "late" not in name]


@functools.cache  # a rank compares ten variants with it
def alone(dtype, situation, n_later):
    """-> what one process makes of the parameters, and its norms. After a step it has data of `n_later` ranks."""
    model, norms = Model(dtype), []
    mains = {param: param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
             for param in model.parameters()}
    optimizer = torch.optim.SGD(map(mains.get, first_of(model, situation)), **SGD)
    for step in range(3):
        model.late.requires_grad_(step > 0 or situation not in ("frozen", "group added"))
        if situation == "group added" and step == 1:
            optimizer.add_param_group({"params": [mains[param] for param in model.late.parameters()], "lr": 0.1})
        n_ranks, own = n_later if step else 4, [param for param in mains if param.requires_grad]
        mean = sum(loss / n_ranks for place in range(n_ranks) for loss in model.losses(situation, place, step))
        for param, grad in zip(own, torch.autograd.grad(mean, own, materialize_grads=True)):
            mains[param].grad = grad.to(mains[param].dtype)
        if situation == "clip":
            norms.append(nn.utils.clip_grad_norm_(mains.values(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        for param, main in mains.items():
            param.data.copy_(main)
            if situation in ("copy_", "data"):
                write(param, situation)
                main.copy_(torch.where(main.to(param.dtype) == param, main, param.data))
    return vector(model), norms


def built(variant, situation, params, **kwargs):
    if variant != OF_STAGE_3:  # each layer is a bucket
        kwargs.update(bucket_cap_mb=1e-4, find_unused_parameters="unused" in situation)
    return optimizer_of(variant)(params, torch.optim.SGD, **SGD, **kwargs)


@pytest.mark.parametrize("variant", [HYBRID, *FEWER_BITS, OF_STAGE_3, *OTHERS])
@on_ranks(4, dtype_and_situation=CASES)
def test_a_variant_beside_what_users_combine_it_with(rank, variant, dtype_and_situation, tmp_path):
    """Train three steps: all ranks have the same parameters, those of one process, and these have moved."""
    dtype, situation = dtype_and_situation
    if situation == "passes by group" and variant not in (HYBRID, OF_STAGE_3):
        return  # as in stage 4: all ranks run equally many passes, or accumulate in no_sync()
    model, n_ranks, n_later = Model(dtype), 4, 2 if situation == "other d" and variant != HYBRID else 4
    start, (expected, norms) = vector(model), alone(dtype, situation, n_later)
    optimizer = built(variant, situation, first_of(model, situation))
    if situation == "prefetch" and variant != OF_STAGE_3:
        optimizer.prefetch_params(model)
    for step in range(3):
        model.late.requires_grad_(step > 0 or situation not in ("frozen", "group added"))
        if situation == "group added" and step == 1:
            optimizer.add_param_group({"params": model.late.parameters(), "lr": 0.1})
        if situation == "other d" and step == 1:
            folder = tmp_path / f"{dtype}, {rank.number // 2 if variant == HYBRID else 'all'}"
            checkpoint.save(folder, model, optimizer).result()
            dist.barrier()
            model = Model(dtype)
            n_ranks = n_later  # if 2, each half of the ranks then trains on the data of the first half
            mesh = on_pairs.mesh_of(4 // n_ranks)
            on = {"mesh": mesh} if variant == HYBRID else {"process_group": mesh.get_group(1)}
            optimizer = built(variant, situation, model.parameters(), **on)
            checkpoint.load(folder, model, optimizer)
        losses = list(model.losses(situation, rank.number % n_ranks, step))
        for loss in losses:
            with no_sync_if(optimizer, situation == "no_sync" and loss is not losses[-1]):
                loss.backward()
        if situation == "clip":
            assert norms[step] > 0.5 and optimizer.clip_grad_norm_(0.5).item() == pytest.approx(norms[step], rel=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters() if situation in ("copy_", "data") else ():
            write(param, situation)
    own, everyone = vector(model), start.new_empty(4, len(start))
    dist.all_gather_into_tensor(everyone.view(-1), own)
    assert (everyone == own).all(), "the ranks have different parameters"
    tolerance = 2e-2 if DTYPES[dtype].itemsize == 2 or variant in FEWER_BITS else 1e-5
    torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance / 4)
    assert (own - start).abs().max() > 5 * tolerance, "this shows nothing: the parameters have hardly moved"
