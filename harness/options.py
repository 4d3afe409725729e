"""The options of every train.py, and its learning rate."""

import argparse
import math

import torch.distributed as dist

from harness import gpt, meeting
from harness.command_line import COUNT, number
from harness.corpus import DATA_BYTES, STDLIB_BYTES
from harness.gpt import MODELS
from harness.meeting import is_rank_0, leave, on_all_ranks

PREEMPTED = 75  # os.EX_TEMPFAIL, a rank's exit code: saved, start me again
TIMEOUT_S = 600  # that a rank waits for another one
SECONDS, SIZE = number(float, 0.001, 10**6), number(float, 0, 10**6)


def connect():
    """Joins the other ranks -> Rank. --timeout is needed for that; whatever is wrong with it, parse_args will say."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--timeout", type=SECONDS, default=TIMEOUT_S)
    try:
        return meeting.connect(parser.parse_known_args()[0].timeout)
    except argparse.ArgumentError:
        return meeting.connect(TIMEOUT_S)


class _Parser(argparse.ArgumentParser):
    """Prints on one rank what argparse would print on each."""

    def error(self, message):
        raise ValueError(f"{message} (--help shows all options)")

    def _print_message(self, message, file=None):
        if is_rank_0():
            super()._print_message(message, file)

    def exit(self, status=0, message=None):
        leave(status)


def parse_args(description, arguments=None):
    """The options of all train.py -> argparse.Namespace. A mistake is one line from rank 0, and exit code 2 on all.

    `arguments`: a list of them, in place of the command line.
    """
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=COUNT, default=200, help="optimizer steps (default 200)")
    add("--model", choices=MODELS, default="tiny", help="size of the GPT (default tiny)")
    add("--lr", type=number(float, 1e-12, 10**6), help="highest learning rate (default: one that suits the model)")
    add("--weight-decay", type=SIZE, default=0.1, help="of AdamW (default %(default)s)")
    add("--batch-size", type=COUNT, default=8, help="sequences per rank and micro-batch (default 8)")
    add("--sequence-length", type=COUNT, help="bytes per sequence (default 128, with nano 64)")
    add("--accumulate", type=COUNT, default=1, help="micro-batches per step (default 1)")
    add("--clip", type=SIZE, default=0.0, help="largest gradient norm; 0 (default): no clipping")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model (default float32)")
    add("--tp", type=COUNT, default=1, metavar="N", help="ranks that share each layer: stage 4 is then "
        "data-parallel over the others (default 1)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, help="of weights and batches (default 0)")
    add("--checkpoint", metavar="DIR", help=f"save there, also on a signal (exit code {PREEMPTED}); go on from there")
    add("--save-every", type=COUNT, metavar="N", help="steps between two of them (default 100)")
    add("--keep", type=number(int, 0, 10**6), metavar="N", help="how many of them, the newest; 0: all (default 3)")
    add("--force", action="store_true", help="go on from a save of another command")
    add("--timeout", type=SECONDS, default=TIMEOUT_S, metavar="SECONDS", help="that a rank waits for another one "
        "(default %(default)s)")
    add("--data", metavar="PATH", help=f"a text file, or a folder of them, up to {DATA_BYTES // 10**6} MB "
        f"(default: {STDLIB_BYTES // 10**6} MB of the source of Python's standard library)")

    def parse():
        args = parser.parse_args(arguments)
        model, n_ranks = MODELS[args.model], dist.get_world_size() if dist.is_initialized() else 1
        args.sequence_length = args.sequence_length or min(128, model.block_size)
        if args.sequence_length > model.block_size:
            parser.error(f"argument --sequence-length: {args.sequence_length} is too long, model {args.model} takes at "
                         f"most {model.block_size}")
        if reason := gpt.misfit(args.tp, n_ranks, model.n_heads, args.sequence_length):
            parser.error(f"argument --tp: {reason}")
        if args.checkpoint == "":
            parser.error("argument --checkpoint: it names no folder")
        if not args.checkpoint and (args.save_every is not None or args.keep is not None):
            parser.error("arguments --save-every and --keep: there is no --checkpoint DIR to save in")
        args.save_every = args.save_every or 100
        args.keep = 3 if args.keep is None else args.keep
        args.lr = args.lr or model.lr
        return args
    return on_all_ranks(parse)


def warmup_then_cosine(steps):
    """For LambdaLR: the learning rate's factor, up to 1 in the first fifth (at most 100 steps), then down to 0.1."""
    warmup = max(1, min(steps // 5, 100))

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)  # 0 to 1
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
    return factor
