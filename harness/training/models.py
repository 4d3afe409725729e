"""Defines two models: a small GPT to train, and a LLaMA, whose parameters are only counted.

`config` is a GPTConfig or LlamaConfig, with the sizes of the model: see options.py. In comments on shapes:

    B    number of sequences in a batch
    T    number of tokens in a sequence; the GPT's tokens are bytes
    C    width of the stream, the tensor (B, T, C) that each block adds to
    H    number of attention heads
    V    size of the vocabulary
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from harness.training.options import MODELS as MODELS
from harness.training.options import GPTConfig


class Attention(nn.Module):
    """Computes causal self-attention.

    The weight of `to_qkv` has the rows for q, k and v of the first head, then those of the second head, and so on.
    """

    def __init__(self, config):
        super().__init__()
        self.head_width = config.width // config.n_heads
        self.to_qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x):
        B, T, _ = x.shape
        qkv = self.to_qkv(x).view(B, T, -1, 3, self.head_width)  # (B, T, H, 3, C/H)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # 3 x (B, H, T, C/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, C/H)
        return self.project(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, C)


class Block(nn.Module):
    """Adds to the stream what attention makes of the normalized stream, and then what a two-layer perceptron makes."""

    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))  # (B, T, C)
        return x + self.project(F.gelu(self.widen(self.mlp_norm(x))))  # (B, T, C); `widen` returns (B, T, 4C)


class GPT(nn.Module):
    """Is a pre-norm GPT with learned positions, in the style of GPT-2 (Radford et al. 2019) and of nanoGPT.

    The output head is a Linear module whose weight is the same Parameter object as the weight of the token embedding.
    So each parameter is used only in the forward() of modules that own it. Stage 4's optimizer relies on that: before
    each forward() its hook waits until the module's parameters have arrived.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialize()

    def _initialize(self):
        """Draw weights as GPT-2 does: normal with std 0.02, but smaller for the last matrix of attention and of MLP."""
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif name.endswith("project.weight"):  # what 2 * n_layers of these add up to shouldn't grow with n_layers
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * self.config.n_layers))
            elif param.dim() == 2:
                nn.init.normal_(param, std=0.02)
            # The rows were drawn for q of all heads, then k, then v. Put them in the order of Attention, head by head.
            # The results in results/ were measured with weights that were drawn so.
            if name.endswith("to_qkv.weight"):
                heads = param.data.unflatten(0, (3, self.config.n_heads, -1))  # (3, H, C/H, C)
                param.data.copy_(heads.transpose(0, 1).flatten(0, 2))

    def forward(self, tokens, targets):
        """Return the mean loss in nats per byte, a tensor of shape (). `tokens` and `targets` are (B, T) int64 each."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        for block in self.blocks:
            x = block(x)  # (B, T, C)
        logits = self.head(self.norm(x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())  # (B * T, V), (B * T,) -> ()


# -------------------------------------------------------------------- LLaMA, whose parameters `make plan` only counts


class LlamaBlock(nn.Module):
    """Adds to the stream what attention makes of the normalized stream, and then what SwiGLU makes of it.

    SwiGLU is LLaMA's perceptron: `gate`, `up` and `down`. Rotary positions are left out, because they have no
    parameters. With tensor parallelism, `config.tensor_parallel` ranks share each layer: every rank has some of the
    heads and a part of the inner width. The module is the part of one rank.
    """

    def __init__(self, config):
        super().__init__()
        n_ranks = config.tensor_parallel  # the number of ranks that share this layer
        self.head_width = config.width // config.n_heads
        query_width = config.width // n_ranks
        key_width = config.n_kv_heads // n_ranks * self.head_width
        inner_width = config.ffn_width // n_ranks
        self.attention_norm = nn.RMSNorm(config.width)
        self.to_q = nn.Linear(config.width, query_width, bias=False)
        self.to_k = nn.Linear(config.width, key_width, bias=False)
        self.to_v = nn.Linear(config.width, key_width, bias=False)
        self.project = nn.Linear(query_width, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, inner_width, bias=False)
        self.up = nn.Linear(config.width, inner_width, bias=False)
        self.down = nn.Linear(inner_width, config.width, bias=False)

    def heads(self, x):
        """Return x, (B, T, heads * C/H), as (B, heads, T, C/H): each head's vectors of width C/H together."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x):  # (B, T, C)
        normalized = self.attention_norm(x)
        q = self.heads(self.to_q(normalized))
        k = self.heads(self.to_k(normalized))
        v = self.heads(self.to_v(normalized))
        # enable_gqa lets several heads of q share one head of k and v: grouped-query attention.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.project(y.transpose(1, 2).flatten(2))
        normalized = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normalized)) * self.up(normalized))


class Llama(nn.Module):
    """Is the part of a LLaMA that one of `config.tensor_parallel` ranks has."""

    def __init__(self, config):
        super().__init__()
        # This rank's share of the vocabulary.
        vocabulary = math.ceil(config.vocabulary / config.tensor_parallel)
        self.token_embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.Sequential(*(LlamaBlock(config) for _ in range(config.n_layers)))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, vocabulary, bias=False)

    def forward(self, tokens, targets):  # (B, T) each
        x = self.blocks(self.token_embedding(tokens))  # (B, T, C)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def model_of(config, dtype):
    """Return the GPT, or the part of a LLaMA that one rank holds, for `config`. `dtype`: a name, such as "bfloat16".

    The parameters are made in this dtype, and not converted to it: `make plan` makes them as fake tensors, which have
    shapes but no memory, and torch can't convert fake tensors in place.
    """
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return GPT(config) if isinstance(config, GPTConfig) else Llama(config)
    finally:
        torch.set_default_dtype(default_dtype)
