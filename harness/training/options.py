"""Reads the options of every train.py, and names the models. It imports no torch, so that errors come at once."""

from dataclasses import dataclass
from typing import NamedTuple

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.ranks.command_line import COUNT, number

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


class Spec(NamedTuple):
    """Sizes of a model. `n_kv_heads` and `ffn_width` are above 0 for a LLaMA, and 0 for a GPT-2.

    `positions`: a GPT-2's longest sequence. `tensor_parallel`: number of ranks that share each layer of a LLaMA. The
    model that is built is one rank's part.
    """
    n_layers: int
    n_heads: int
    width: int
    vocabulary: int
    n_kv_heads: int = 0
    ffn_width: int = 0
    positions: int = 1024
    tensor_parallel: int = 1


SPECS = {  # of all models that `make plan` counts, MODELS among them
    "7b": Spec(32, 32, 4096, 32000, n_kv_heads=32, ffn_width=11008),
    "13b": Spec(40, 40, 5120, 32000, n_kv_heads=40, ffn_width=13824),
    "70b": Spec(80, 64, 8192, 32000, n_kv_heads=8, ffn_width=28672),
    "gpt2": Spec(12, 12, 768, 50257), "gpt2-medium": Spec(24, 16, 1024, 50257),
    "gpt2-large": Spec(36, 20, 1280, 50257), "gpt2-xl": Spec(48, 25, 1600, 50257),
    **{name: Spec(config.n_layers, config.n_heads, config.width, VOCABULARY, positions=config.block_size)
       for name, config in MODELS.items()},
}


# ------------------------------------------------------------------------------------------------ Options of a train.py


STDLIB_BYTES = 8_000_000  # the first of the standard library, in alphabetical order: they load in under a second
DATA_BYTES = 256_000_000  # the first of --data; a program reads no more
PREEMPTED = 75  # a rank's exit code, os.EX_TEMPFAIL: it has saved, and is to be started again
INTERRUPTED = 130  # a rank's exit code after Ctrl-C, when it has saved: 128 + the number of SIGINT, as in shells
TIMEOUT_S = 600  # a rank waits so long for another one
SECONDS = number(float, 0.001, 10**6)
NOT_NEGATIVE = number(float, 0, 10**6)


def parse(parser, n_ranks, script, arguments=None):
    """Return the options in the list `arguments` (default: the command line). parser.error() gets a mistake.

    script: Path of the train.py that runs on `n_ranks`.
    """
    add = parser.add_argument
    add("--steps", type=COUNT, default=200, help="optimizer steps (default 200)")
    add("--model", choices=MODELS, default="tiny", help="size of the GPT (default tiny)")
    add("--lr", type=number(float, 1e-12, 10**6), help="highest learning rate (default: one that suits the model)")
    add("--weight-decay", type=NOT_NEGATIVE, default=0.1, help="of AdamW (default %(default)s)")
    add("--batch-size", type=COUNT, default=8, help="sequences per rank and micro-batch (default 8)")
    add("--sequence-length", type=COUNT, help="bytes per sequence (default 128, with nano 64)")
    add("--accumulate", type=COUNT, default=1, help="micro-batches per step (default 1)")
    add("--clip", type=NOT_NEGATIVE, default=0.0, help="largest gradient norm; 0 (default): no clipping")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model (default float32)")
    add("--tp", type=COUNT, default=1, metavar="N", help="ranks that share each layer: stage 4 is then "
        "data-parallel over the others (default 1)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, help="of weights and batches (default 0)")
    add("--checkpoint", metavar="DIR", help=f"save there, also on Ctrl-C or a signal (exit code {PREEMPTED}); go on "
        "from there")
    add("--save-every", type=COUNT, metavar="N", help="steps between two saves (default 100)")
    add("--keep", type=number(int, 0, 10**6), metavar="N", help="how many of the newest saves stay; 0: all (default 3)")
    add("--force", action="store_true", help="go on from a save of another command")
    add("--timeout", type=SECONDS, default=TIMEOUT_S, metavar="SECONDS", help="that a rank waits for another one "
        "(default %(default)s)")
    add("--data", metavar="PATH", help=f"a text file, or a folder of them, up to {DATA_BYTES // 10**6} MB "
        f"(default: {STDLIB_BYTES // 10**6} MB of the source of Python's standard library)")

    args = parser.parse_args(arguments)
    model = MODELS[args.model]
    args.sequence_length = args.sequence_length or min(128, model.block_size)
    if args.sequence_length > model.block_size:
        parser.error(f"argument --sequence-length: {args.sequence_length} is too long, model {args.model} takes at "
                     f"most {model.block_size}")
    if reason := misfit(args.tp, script, n_ranks, model.n_heads, args.sequence_length):
        parser.error(f"argument --tp: {reason}")
    if args.checkpoint == "":
        parser.error("argument --checkpoint: it names no folder")
    if not args.checkpoint and (args.save_every is not None or args.keep is not None):
        parser.error("arguments --save-every and --keep: there is no --checkpoint DIR to save in")
    args.save_every = args.save_every or 100
    args.keep = 3 if args.keep is None else args.keep  # 0 keeps all
    args.lr = args.lr or model.lr
    return args


def misfit(tp, script, world_size, n_heads, sequence_length):
    """Return the reason why `tp` ranks of a program can't share each layer, or None."""
    folders_without_tp = STAGE_1, STAGE_2, STAGE_3, "training"
    if tp > 1 and script.resolve().parent.name in folders_without_tp:
        return f"it is for {STAGE_4}/train.py, whose optimizer takes DTensors"
    for words, n in ((f"{world_size} ranks", world_size), (f"{n_heads} heads", n_heads),
                     (f"sequences of {sequence_length}", sequence_length)):
        if n % tp:
            return f"{tp} ranks can't share each layer: {words} can't be split into {tp} equal parts"
    return None
