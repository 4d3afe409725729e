"""Reads the options of every train.py, and lists the models with their sizes.

This module doesn't import torch, which takes seconds, so a wrong option is reported at once. Each of the four stages,
which are optimizers, has a train.py with the same options. A rank is one of the processes that train.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.ranks.command_line import COUNT, number


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT, and a learning rate."""
    n_layers: int
    n_heads: int  # heads of attention in each layer
    width: int  # length of the vector that stands for a token between two layers
    block_size: int  # the number of tokens in the longest sequence
    lr: float  # a learning rate that suits this model with AdamW
    vocabulary: int = 256  # a token is a byte
    tensor_parallel: int = 1  # a field of LlamaConfig, too; 1 says that each rank has whole layers


# The embedding of 256 tokens is small. So these models have more layers than a GPT-2 with as many parameters.
MODELS = {
    "nano": GPTConfig(n_layers=2, n_heads=2, width=32, block_size=64, lr=1e-3),  # for the tests
    "tiny": GPTConfig(n_layers=6, n_heads=6, width=384, block_size=256, lr=1e-3),  # 10,844,160 parameters
    "small": GPTConfig(n_layers=17, n_heads=12, width=768, block_size=1024, lr=6e-4),  # 121,478,400 parameters
    "medium": GPTConfig(n_layers=28, n_heads=16, width=1024, block_size=1024, lr=3e-4),  # 354,007,040 parameters
}


class LlamaConfig(NamedTuple):
    """Sizes of a LLaMA, which is not trained here: `make plan` counts its parameters."""
    n_layers: int
    n_heads: int  # heads of attention in each layer
    width: int  # length of the vector that stands for a token between two layers
    n_kv_heads: int  # heads that keys and values have; several heads of queries may share one of these
    ffn_width: int  # the inner width of the feed-forward network
    vocabulary: int = 32000
    tensor_parallel: int = 1  # how many ranks share each layer; the model that is built is one rank's part


LLAMAS = {
    "7b": LlamaConfig(n_layers=32, n_heads=32, width=4096, n_kv_heads=32, ffn_width=11008),
    "13b": LlamaConfig(n_layers=40, n_heads=40, width=5120, n_kv_heads=40, ffn_width=13824),
    "70b": LlamaConfig(n_layers=80, n_heads=64, width=8192, n_kv_heads=8, ffn_width=28672),
}
GPT2 = {"gpt2": GPTConfig(n_layers=12, n_heads=12, width=768, block_size=1024, lr=6e-4, vocabulary=50257)}
PLANNED_MODELS = {**LLAMAS, **GPT2, **MODELS}  # all models that `make plan` counts


# ------------------------------------------------------------------------------------------------ Options of a train.py


# Exit codes of a rank that was told to stop, by a signal, and has saved a checkpoint.
PREEMPTED = 75  # os.EX_TEMPFAIL, by which a program asks to be started again later; training then goes on
INTERRUPTED = 130  # after Ctrl-C, which is SIGINT: 128 + its number, as in shells
TIMEOUT_S = 600  # how many seconds a rank waits for another rank by default
# Types of options. `number` returns a function that refuses a number outside of its two limits. COUNT is a third type,
# for an int above 0.
SECONDS = number(float, 0.001, 10**6)
NOT_NEGATIVE = number(float, 0, 10**6)


def parse(parser, arguments=None):
    """Return the options in `arguments`, a list of words; by default the words of the command line.

    For a wrong option this calls parser.error(message), which doesn't return: it ends the program, or raises.
    """
    add = parser.add_argument
    add("--steps", type=COUNT, default=200, help="optimizer steps (default 200)")
    add("--model", choices=MODELS, default="tiny", help="size of the GPT (default tiny)")
    add("--lr", type=number(float, 1e-12, 10**6), help="highest learning rate (default: one that suits the model)")
    add("--weight-decay", type=NOT_NEGATIVE, default=0.1, help="weight decay of AdamW (default %(default)s)")
    add("--batch-size", type=COUNT, default=8, help="sequences per rank and micro-batch (default 8)")
    add("--sequence-length", type=COUNT, help="bytes per sequence (default 128, with nano 64)")
    add("--accumulate", type=COUNT, default=1, help="micro-batches per step (default 1)")
    add("--clip", type=NOT_NEGATIVE, default=0.0, help="largest gradient norm; 0 (default): no clipping")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the model (default float32)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, help="seed of weights and batches (default 0)")
    add("--checkpoint", metavar="DIR", help=f"save there, also on Ctrl-C or a signal (exit code {PREEMPTED}); go on "
        "from there; the three newest saves stay")
    add("--save-every", type=COUNT, metavar="N", help="steps between two saves (default 100)")
    add("--timeout", type=SECONDS, default=TIMEOUT_S, metavar="SECONDS",
        help="how long a rank waits for another (default %(default)s)")
    add("--data", type=Path, metavar="FILE", help="text to train on (default: the source of Python's standard library)")

    args = parser.parse_args(arguments)
    model = MODELS[args.model]
    if args.sequence_length is None:
        args.sequence_length = min(128, model.block_size)
    if args.sequence_length > model.block_size:
        parser.error(f"argument --sequence-length: {args.sequence_length} is too long, model {args.model} takes at "
                     f"most {model.block_size}")
    if args.checkpoint == "":
        parser.error("argument --checkpoint: it names no folder")
    if args.checkpoint is None and args.save_every is not None:
        parser.error("argument --save-every: there is no --checkpoint DIR to save in")
    if args.save_every is None:
        args.save_every = 100
    if args.lr is None:
        args.lr = model.lr
    return args
