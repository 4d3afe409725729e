"""The options of every train.py, and its learning rate."""

import argparse
import functools
import math

import torch.distributed as dist

from harness import command_line, gpt, meeting
from harness.corpus import DATA_BYTES, STDLIB_BYTES
from harness.gpt import MODELS
from harness.meeting import is_rank_0, leave, on_all_ranks

PREEMPTED = 75  # os.EX_TEMPFAIL, a rank's exit code: saved, start me again
WEIGHT_DECAY = 0.1
TIMEOUT_S, MOST_TIMEOUT_S = 600, 10**6  # that a rank waits for another one


def connect():
    """Joins the other ranks -> Rank. --timeout is needed for that; whatever is wrong with it, parse_args will say."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--timeout", type=_positive(float), default=TIMEOUT_S)
    try:
        timeout_s = parser.parse_known_args()[0].timeout
    except argparse.ArgumentError:
        timeout_s = TIMEOUT_S
    return meeting.connect(min(timeout_s, MOST_TIMEOUT_S))


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
    add("--steps", type=_positive(int), default=200, help="optimizer steps (default 200)")
    add("--model", choices=MODELS, default="tiny", help="size of the GPT (default tiny)")
    add("--lr", type=_positive(float), help="highest learning rate (default: one that suits the model)")
    add("--weight-decay", type=_not_negative(float), help=f"of AdamW (default {WEIGHT_DECAY})")
    add("--batch-size", type=_positive(int), default=8, help="sequences per rank and micro-batch (default 8)")
    add("--sequence-length", type=_positive(int), help="bytes per sequence (default 128, with nano 64)")
    add("--accumulate", type=_positive(int), default=1, help="micro-batches per step (default 1)")
    add("--clip", type=_not_negative(float), default=0.0, help="largest gradient norm; 0 (default): no clipping")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model (default float32)")
    add("--tp", type=_positive(int), default=1, metavar="N", help="ranks that share each layer: stage 4 is then "
        "data-parallel over the others (default 1)")
    add("--seed", type=_not_negative(int), default=0, help="of weights and batches (default 0)")
    add("--checkpoint", metavar="DIR", help="folder of checkpoints; go on from the newest complete one in it, and save "
        f"on SIGTERM, SIGHUP and SIGUSR1: exit code {PREEMPTED}, and the same command goes on")
    add("--save-every", type=_positive(int), metavar="N", help="steps between two of them (default 100)")
    add("--keep", type=_not_negative(int), metavar="N", help="how many of them, the newest; 0: all (default 3)")
    add("--resume-from", type=_positive(int), metavar="STEP", help="go on from this one; later ones are set aside")
    add("--force", action="store_true", help="go on from a checkpoint of other data, or another seed or batch size")
    add("--timeout", type=_positive(float), default=TIMEOUT_S, metavar="SECONDS", help="that a rank waits for another "
        "one (default %(default)s)")
    add("--data", metavar="PATH", help=f"a text file, or a folder of them, up to {DATA_BYTES // 10**6} MB "
        f"(default: {STDLIB_BYTES // 10**6} MB of the source of Python's standard library)")

    def parse():
        args = parser.parse_args(arguments)
        command_line.check_at_least_1(args, ("steps", "batch_size", "accumulate"), parser.error)
        if args.seed >= 2**63:
            parser.error(f"argument --seed: {args.seed} is too large, torch takes at most 2**63 - 1")
        block_size = MODELS[args.model].block_size
        args.sequence_length = args.sequence_length or min(128, block_size)
        if args.sequence_length > block_size:
            parser.error(f"argument --sequence-length: {args.sequence_length} is too long, model {args.model} takes at "
                         f"most {block_size}")
        n_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if reason := gpt.misfit(args.tp, n_ranks, MODELS[args.model].n_heads, args.sequence_length):
            parser.error(f"argument --tp: {reason}")
        if args.checkpoint == "":
            parser.error("argument --checkpoint: it names no folder")
        for option in ("save_every", "keep", "resume_from"):
            if getattr(args, option) is not None and not args.checkpoint:
                parser.error(f"argument --{option.replace('_', '-')}: there is no --checkpoint DIR to save in")
        if args.timeout > MOST_TIMEOUT_S:
            parser.error(f"argument --timeout: {args.timeout:g} is too long, it must be at most {MOST_TIMEOUT_S}")
        args.given = {option for option in ("lr", "weight_decay") if getattr(args, option) is not None}
        args.lr = args.lr or MODELS[args.model].lr
        args.weight_decay = WEIGHT_DECAY if args.weight_decay is None else args.weight_decay
        args.save_every, args.keep = args.save_every or 100, 3 if args.keep is None else args.keep
        return args
    return on_all_ranks(parse)


def _not_negative(kind, description="non-negative", lowest=0.0):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not lowest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be a {description} {'whole ' if kind is int else ''}number, "
                                             f"not {text!r}")
        return value
    return parse


_positive = functools.partial(_not_negative, description="positive", lowest=math.ulp(0.0))


def warmup_then_cosine(steps):
    """For LambdaLR: the learning rate's factor, up to 1 in the first fifth (at most 100 steps), then down to 0.1."""
    warmup = max(1, min(steps // 5, 100))

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)  # 0 to 1
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
    return factor
