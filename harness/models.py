"""Builds LLaMA and GPT-2 by name, for make plan: to be counted, never trained."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from harness.gpt import GPT, MODELS, VOCABULARY, GPTConfig


class Spec(NamedTuple):
    """Sizes of a model. `n_kv_heads`, `ffn_width`: of a LLaMA; 0: a GPT-2. `positions`: a GPT-2's longest sequence.
    `tensor_parallel`: how many ranks share each layer of a LLaMA; the model that is built is what one of them holds."""
    n_layers: int
    n_heads: int
    width: int
    vocabulary: int
    n_kv_heads: int = 0
    ffn_width: int = 0
    positions: int = 1024
    tensor_parallel: int = 1


NAMED = {
    "7b": Spec(32, 32, 4096, 32000, 32, 11008), "13b": Spec(40, 40, 5120, 32000, 40, 13824),
    "70b": Spec(80, 64, 8192, 32000, 8, 28672),
    "gpt2": Spec(12, 12, 768, 50257), "gpt2-medium": Spec(24, 16, 1024, 50257),
    "gpt2-large": Spec(36, 20, 1280, 50257), "gpt2-xl": Spec(48, 25, 1600, 50257),
    **{name: Spec(config.n_layers, config.n_heads, config.width, VOCABULARY, positions=config.block_size)
       for name, config in MODELS.items()},
}


def of_size(n_layers, width):
    """Return the Spec of a LLaMA with heads of 128, and an inner layer 8/3 as wide, a multiple of 256."""
    heads = width // 128
    return Spec(n_layers, heads, width, 32000, heads, 256 * -(-width * 8 // 3 // 256))


class LlamaBlock(nn.Module):
    """Adds attention and SwiGLU to the stream, each of it normalized, without rotary positions: these hold nothing."""

    def __init__(self, spec):
        super().__init__()
        share = spec.tensor_parallel
        self.head = spec.width // spec.n_heads
        query_width = spec.width // share
        key_width = spec.n_kv_heads // share * self.head
        inner_width = spec.ffn_width // share
        self.attention_norm = nn.RMSNorm(spec.width)
        self.to_q = nn.Linear(spec.width, query_width, bias=False)
        self.to_k = nn.Linear(spec.width, key_width, bias=False)
        self.to_v = nn.Linear(spec.width, key_width, bias=False)
        self.project = nn.Linear(query_width, spec.width, bias=False)
        self.mlp_norm = nn.RMSNorm(spec.width)
        self.gate = nn.Linear(spec.width, inner_width, bias=False)
        self.up = nn.Linear(spec.width, inner_width, bias=False)
        self.down = nn.Linear(inner_width, spec.width, bias=False)

    def forward(self, x):  # (B, T, C)
        y = self.attention_norm(x)
        q, k, v = (to(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.project(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, spec):
        super().__init__()
        vocabulary = -(-spec.vocabulary // spec.tensor_parallel)
        self.token_embedding = nn.Embedding(vocabulary, spec.width)
        self.blocks = nn.Sequential(*(LlamaBlock(spec) for _ in range(spec.n_layers)))
        self.norm = nn.RMSNorm(spec.width)
        self.head = nn.Linear(spec.width, vocabulary, bias=False)

    def forward(self, tokens, targets):  # (B, T) each
        x = self.blocks(self.token_embedding(tokens))  # (B, T, C)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def build_model(spec, dtype):
    """Build what one rank holds of the model. Fake tensors can't be converted in place: they are made in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        if spec.n_kv_heads:
            return Llama(spec)
        model = GPT(GPTConfig(spec.n_layers, spec.n_heads, spec.width, spec.positions, lr=0.0))
        model.token_embedding = nn.Embedding(spec.vocabulary, spec.width)
        model.head = nn.Linear(spec.width, spec.vocabulary, bias=False)
        model.head.weight = model.token_embedding.weight
        return model
    finally:
        torch.set_default_dtype(before)
