"""Defines models: a small GPT that is trained, and LLaMA and GPT-2 by name, which are counted and never trained.

Shapes: B sequences, T bytes each, C = width, H = heads, V = 256.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4

VOCABULARY = 256  # one symbol a byte


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `block_size` is the longest sequence it takes, `lr` a learning rate that suits it with AdamW."""
    n_layers: int
    n_heads: int
    width: int
    block_size: int
    lr: float


# With 256 symbols the embedding is small: there are more layers than in a GPT-2 of the same number of parameters.
MODELS = {
    "nano": GPTConfig(n_layers=2, n_heads=2, width=32, block_size=64, lr=1e-3),  # for the tests
    "tiny": GPTConfig(n_layers=6, n_heads=6, width=384, block_size=256, lr=1e-3),  # 10,844,160 parameters
    "small": GPTConfig(n_layers=17, n_heads=12, width=768, block_size=1024, lr=6e-4),  # 121,478,400
    "medium": GPTConfig(n_layers=28, n_heads=16, width=1024, block_size=1024, lr=3e-4),  # 354,007,040
    "large": GPTConfig(n_layers=24, n_heads=16, width=2048, block_size=1024, lr=2e-4),  # 1,211,224,064
}


class Attention(nn.Module):
    """Is causal self-attention. Rows of `to_qkv` are q, k and v of each head in turn: ranks can have whole heads."""

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
    """Adds attention and a two-layer perceptron to the stream, each applied to the normalized stream."""

    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))  # (B, T, C)
        return x + self.project(F.gelu(self.widen(self.mlp_norm(x))))  # (B, T, C), inside (B, T, 4C)


class GPT(nn.Module):
    """Is a pre-norm GPT with learned positions, in the style of GPT-2 (Radford et al. 2019) and of nanoGPT.

    The output head is a Linear module whose weight is the token embedding's very Parameter: every parameter is read in
    the forward of a module that owns it, which is where an optimizer's forward hooks look for it.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialize()

    def _initialize(self):
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif name.endswith("project.weight"):  # the sum of all that the blocks add must not grow with their number
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * self.config.n_layers))
            elif param.dim() == 2:
                nn.init.normal_(param, std=0.02)
            if name.endswith("to_qkv.weight"):  # drawn for all q, then all k, then all v: results/ are of such weights
                heads = param.data.unflatten(0, (3, self.config.n_heads, -1))  # (3, H, C/H, C)
                param.data.copy_(heads.transpose(0, 1).flatten(0, 2))

    def forward(self, tokens, targets=None):
        """Take (B, T) int64 each. Returns logits (B, T, V), or with targets the mean loss in nats per byte, ()."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        for block in self.blocks:
            x = block(x)  # (B, T, C)
        logits = self.head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())  # (B T, V), (B T,) -> ()


def build_model(args, rank):
    """Build the model of the command line on this rank's device, with the same weights on every rank and machine.

    With --tp its layers are shared by as many ranks, and `args.process_group` becomes the ranks that have the same
    parts as this one; else None, all of them.
    """
    torch.manual_seed(args.seed)
    model = GPT(MODELS[args.model]).to(rank.device, getattr(torch, args.dtype))
    args.process_group = share_layers(model, args.tp, rank) if args.tp > 1 else None
    return model


def misfit(tp, world_size, n_heads, sequence_length):
    """Say why `tp` ranks can't share the layers, or return None."""
    folders_of_other_programs = STAGE_1, STAGE_2, STAGE_3, "training"
    if tp > 1 and Path(sys.argv[0]).resolve().parent.name in folders_of_other_programs:
        return f"it is for {STAGE_4}/train.py, whose optimizer takes DTensors"
    for words, n in ((f"{world_size} ranks", world_size), (f"{n_heads} heads", n_heads),
                     (f"sequences of {sequence_length}", sequence_length)):
        if n % tp:
            return f"{tp} ranks can't share each layer, {words} aren't divided by that"


def share_layers(model, tp, rank):
    """Cut the parameters of a GPT into DTensors, in place. Returns the process group of the ranks with the same parts.

    Collective over all ranks, `tp` of which share each layer: neighbours, as NVLink joins them.
    """
    from torch.distributed.device_mesh import init_device_mesh  # imported late: it takes a second
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as by

    mesh = init_device_mesh(rank.device.type, (rank.world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    sequence = Shard(1)  # of (B, T, C)
    columns = by.ColwiseParallel(input_layouts=sequence)
    rows = by.RowwiseParallel(output_layouts=sequence)
    for block in model.blocks:
        by.parallelize_module(block, mesh["tp"], {
            "attention_norm": by.SequenceParallel(), "attention.to_qkv": columns, "attention.project": rows,
            "mlp_norm": by.SequenceParallel(), "widen": columns, "project": rows})
    by.parallelize_module(model, mesh["tp"], {
        "token_embedding": by.RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "position_embedding": by.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),  # of (T, C)
        "norm": by.SequenceParallel(), "head": by.ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())})
    model.head.weight = model.token_embedding.weight  # cut alike, and one Parameter again
    return mesh["dp"].get_group()


# ------------------------------------------------------ Models of any size, for make plan: to be counted, never trained


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


def model_of(spec, dtype):
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
