"""Each variant, with each thing that users combine it with, gives the result of one process with the data of all ranks.

Four ranks, which hybrid takes as two groups of two.
"""

import pytest
import torch
from torch import nn

from guard.scaling import tensors_of_ranks
from tests.common import on_ranks, trainable
from tests.pairs import Pair

HYBRID = "tests.variants.on_pairs"
PER_PARAMETER = "variants.per_parameter"
FEWER_BITS = ["variants.wire16", "variants.moments16"]
OTHERS = ["variants.muon", "variants.finite", "variants.blocks", "variants.offload", "variants.remainder16"]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16,
          "mixed": torch.bfloat16}  # mixed: with layers in fp32
SITUATIONS = ["unused", "data", "clip", "no_sync", "prefetch", "frozen", "group added"]
SGD = {"lr": 0.2, "momentum": 0.9}


class Model(nn.Module):
    def __init__(self, seed, dtype_name, has_unused):
        super().__init__()
        torch.manual_seed(seed)
        self.has_unused = has_unused
        self.norm = nn.LayerNorm(7)
        self.late = nn.Linear(7, 7)
        self.first = nn.Linear(7, 7)
        self.to(DTYPES[dtype_name])
        if dtype_name == "mixed":
            self.norm.float()
            self.late.float()

    def forward(self, x):
        is_late_used = not self.has_unused or x[0, 0] > 0  # ranks have unlike x
        layers = [self.first, self.late, self.norm] if is_late_used else [self.first, self.norm]
        for layer in layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float()


def values(model):
    return torch.cat([param.detach().double().flatten() for param in model.parameters()])


def without_late(model):
    return [*model.norm.parameters(), *model.first.parameters()]


def add_late(pair):
    """Add the parameters of the layer `late` to both optimizers."""
    params = [*pair.replicated.model.late.parameters()]
    main_params = [pair.replicated.main.get(param, param) for param in params]
    pair.replicated.optimizer.add_param_group({"params": main_params, "lr": 0.1})
    pair.optimizer.add_param_group({"params": pair.model.late.parameters(), "lr": 0.1})


def clamp_data(pair):
    """Write into the parameters through `data`, of which autograd's version counter doesn't know.

    For 16-bit parameters a program must then increment the counter, as docs/reference.md says. 1/8 has no rounding in
    16 bits.
    """
    for param in pair.model.parameters():
        param.data.clamp_(-1 / 8, 1 / 8)
        if param.itemsize == 2:
            torch.autograd.graph.increment_version(param)
    for param in pair.replicated.model.parameters():
        for tensor in (param, pair.replicated.main.get(param, param)):
            tensor.data.clamp_(-1 / 8, 1 / 8)


@pytest.mark.parametrize("variant", [HYBRID, *FEWER_BITS, PER_PARAMETER, *OTHERS])
@on_ranks(4, dtype_name=DTYPES, situation=SITUATIONS)
def test_a_variant_beside_what_users_combine_it_with(rank, variant, dtype_name, situation):
    """Train three steps. All ranks then have the parameters of one process, and the parameters have moved."""
    options = {}
    if variant != PER_PARAMETER:  # all others have buckets: here each layer is one
        options = {"bucket_cap_mb": 1e-4, "find_unused_parameters": situation == "unused"}
    params_of = trainable
    if situation == "group added":
        params_of = without_late
    pair = Pair(rank, variant, torch.optim.SGD, params_of, seeds=[0], own=options, **SGD,
                net=lambda seed: Model(seed, dtype_name, has_unused=situation == "unused"))
    if situation == "prefetch" and variant != PER_PARAMETER:
        pair.optimizer.prefetch_params(pair.model)
    start = values(pair.replicated.model)
    for step in range(3):
        for model in pair.models:
            model.late.requires_grad_(step > 0 or situation not in ("frozen", "group added"))
        if step == 1 and situation == "group added":
            add_late(pair)
        if situation == "no_sync":
            with pair.optimizer.no_sync():
                pair.backward(10 + step)
        pair.backward(step)
        if situation == "clip":
            assert pair.clip(0.5, rtol=1e-2) > 0.5
        pair.step()
        if situation == "data":
            clamp_data(pair)
    end = values(pair.model)
    assert (tensors_of_ranks(end, None) == end).all(), "the ranks have different parameters"
    tolerance = 2e-2 if DTYPES[dtype_name].itemsize == 2 or variant in FEWER_BITS else 1e-5
    torch.testing.assert_close(end, values(pair.replicated.model), rtol=tolerance, atol=tolerance / 4)
    assert (end - start).abs().max() > 5 * tolerance, "this shows nothing: the parameters have hardly moved"
