"""What the stages are tried on: a small GPT, real text that is on every machine, and what the train.py have in common.

The text is the source of Python's own standard library, byte by byte: nothing to download, no tokenizer, 256 symbols.
"""

import argparse
import math
import os
import platform
import sys
import sysconfig
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rich.console
import rich.progress
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import checkpoint
from harness.run import cli, launch
from harness.run.launch import disconnect
from harness.train import resume

VOCABULARY = 256  # one symbol a byte
STDLIB_BYTES = 8_000_000  # of the standard library, files in alphabetical order: loads in a fraction of a second
DATA_BYTES = 256_000_000  # of --data: what is beyond is not read
VALIDATION_PART = 0.1  # the end of the text
VALIDATION_SEQUENCES = 128  # the same ones every time, evenly spread over that part
BAR_WIDTH = 72  # columns that a progress bar with its numbers takes, at least
REPORT_EVERY = 10  # steps between two looks at the loss: each look waits for the device, and for all ranks
WEIGHT_DECAY = 0.1
TIMEOUT_S, MOST_TIMEOUT_S = 600, 10**6  # that a rank waits for another one


# ---------------------------------------------------------------------------------------------------------------------
# The model: B sequences, T bytes each, C = width, H = heads, V = 256


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
    """Causal self-attention."""

    def __init__(self, config):
        super().__init__()
        self.n_heads = config.n_heads
        self.to_qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.to_qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads)  # (B, T, 3, H, C/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 x (B, H, T, C/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, C/H)
        return self.project(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on normalized input, each added to the stream that it read."""

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
    """A pre-norm GPT with learned positions, in the style of GPT-2 (Radford et al. 2019) and of nanoGPT.

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

    def forward(self, tokens, targets=None):
        """`tokens`, `targets`: (B, T) int64 -> logits (B, T, V), or with targets the mean loss in nats a byte, ()."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        for block in self.blocks:
            x = block(x)  # (B, T, C)
        logits = self.head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())  # (B T, V), (B T,) -> ()


def build_model(args, rank):
    """The model that the command line asks for, on this rank's device; the same weights on every rank and machine."""
    torch.manual_seed(args.seed)
    return GPT(MODELS[args.model]).to(rank.device, getattr(torch, args.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# The data

# Not read: tests (they repeat themselves), installed packages, tables of numbers, and files made on this machine.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "encodings", "pydoc_data"}


def load_bytes(path=None):
    """The text at `path`, a file or a folder of text files; None: Python's standard library -> (n,) uint8.

    Folders are read in alphabetical order, without hidden files and files that hold a zero byte. At most DATA_BYTES.
    Raises ValueError when there is nothing to read, naming the path.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files, limit = [file for file in _files(root) if file.suffix == ".py"], STDLIB_BYTES
        advice = "this Python comes without its source: give a text file or folder with --data"
    else:
        advice = "give a text file, or a folder with text files"
        try:
            root = Path(path).expanduser()
            is_there = bool(path) and root.exists()
        except (OSError, RuntimeError) as error:  # its name is too long, or of a user that there isn't
            raise ValueError(f"--data {path}: {error}; {advice}") from None
        if not is_there:
            raise ValueError(f"--data {path}: there is no such file or folder; {advice}")
        files, limit = _files(root, skipped=()) if root.is_dir() else [root], DATA_BYTES
    data = _read(files, limit, skip_binary=root.is_dir())
    if not data:
        raise ValueError(f"{root}: no text in it; {advice}")
    return np.frombuffer(data, dtype=np.uint8)


def _files(root, skipped=STDLIB_SKIPPED):
    """The files below `root`, sorted by relative path, without hidden ones, and folders of names in `skipped`."""
    found = []
    for folder, subfolders, names in os.walk(root):
        # Assigned in place: os.walk then doesn't enter the others (site-packages alone may hold 100 000 files).
        subfolders[:] = [name for name in subfolders if name not in skipped and _is_wanted(name)]
        found += [path for name in names if _is_wanted(name) and (path := Path(folder, name)).is_file()]  # no pipes
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _is_wanted(name):
    return not name.startswith((".", "__pycache__", "_sysconfigdata"))


def _read(files, limit, skip_binary):
    """The contents of `files`, one after the other, as bytes; stops at `limit` bytes."""
    text = bytearray()
    for file in files:
        try:
            with open(file, "rb") as opened:
                content = opened.read(limit - len(text))
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror}") from None
        if not (skip_binary and b"\0" in content):
            text += content
        if len(text) == limit:
            break
    return bytes(text)


def split(data):
    """-> (train, validation): the first 90 % and the last 10 % of `data`."""
    at = len(data) - round(len(data) * VALIDATION_PART)
    return data[:at], data[at:]


class Batches:
    """Training batches by number, the same ones whenever they are asked for.

    The whole batch of a step, `world_size * batch_size` sequences, is drawn from (seed, step), and this rank takes its
    part of it: 2 ranks with 8 sequences each see the same text as 4 ranks with 4.
    """

    def __init__(self, data, batch_size, sequence_length, rank, world_size, seed=0, device="cpu"):
        if len(data) <= sequence_length:
            raise ValueError(f"{len(data)} bytes to train on are too few for one sequence of {sequence_length} + 1")
        self.data, self.batch_size, self.sequence_length = data, batch_size, sequence_length
        self.rank, self.world_size, self.seed, self.device = rank, world_size, seed, torch.device(device)

    def batch(self, step):
        """-> (tokens, targets), each (B, T) int64 on the device. The target of a byte is the byte after it."""
        generator = np.random.default_rng((self.seed, step))
        n_starts = len(self.data) - self.sequence_length
        starts = generator.integers(n_starts, size=(self.world_size, self.batch_size))[self.rank]
        return _sequences(self.data, starts, self.sequence_length, self.device)


def validation_batches(data, batch_size, sequence_length, rank, world_size, device="cpu"):
    """This rank's part of VALIDATION_SEQUENCES fixed sequences -> list of (tokens, targets), each (B or fewer, T)."""
    if len(data) <= sequence_length:
        raise ValueError(f"{len(data)} bytes to validate on are too few for one sequence of {sequence_length} + 1")
    starts = np.linspace(0, len(data) - sequence_length - 1, VALIDATION_SEQUENCES).astype(np.int64)[rank::world_size]
    pieces = [starts[i:i + batch_size] for i in range(0, len(starts), batch_size)]
    return [_sequences(data, piece, sequence_length, torch.device(device)) for piece in pieces]


def _sequences(data, starts, sequence_length, device):
    rows = starts[:, None] + np.arange(sequence_length + 1)  # (B, T + 1)
    text = torch.from_numpy(data[rows].astype(np.int64))  # (B, T + 1)
    if device.type == "cuda":  # from pinned memory the copy doesn't make the CPU wait for the GPU
        text = text.pin_memory().to(device, non_blocking=True)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()  # (B, T), (B, T)


def load_data(args, rank):
    """-> (Batches to train on, list of validation batches) of this rank. Bad data ends all ranks with one line."""
    def load():
        data = load_bytes(args.data)
        train, validation = split(data)
        if len(validation) <= args.sequence_length:
            needed = math.ceil((args.sequence_length + 1) / VALIDATION_PART)
            raise ValueError(f"--data {args.data or 'stdlib'}: {len(data)} bytes are too few: the last 10 % "
                             f"must hold one sequence: give at least {needed} bytes, or a shorter --sequence-length")
        args.text = args.data or "stdlib", len(data), zlib.crc32(data)  # for checkpoints, to be recognized
        sizes = args.batch_size, args.sequence_length, rank.rank, rank.world_size
        return (Batches(train, *sizes, args.seed, rank.device),
                validation_batches(validation, *sizes, rank.device))
    return on_all_ranks(load)


# ---------------------------------------------------------------------------------------------------------------------
# What the train.py have in common


def connect():
    """Joins the other ranks -> Rank. --timeout is needed for that; whatever is wrong with it, parse_args will say."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--timeout", type=_positive(float), default=TIMEOUT_S)
    try:
        timeout_s = parser.parse_known_args()[0].timeout
    except argparse.ArgumentError:
        timeout_s = TIMEOUT_S
    return launch.connect(min(timeout_s, MOST_TIMEOUT_S))


def on_all_ranks(function):
    """function(), or, if it raises ValueError on any rank: one line from rank 0, and every rank exits with code 2.

    The ranks agree first, because torchrun ends all of them as soon as one has ended: rank 0 must have printed by then.
    """
    result, error = None, None
    try:
        result = function()
    except ValueError as mistake:
        error = str(mistake)
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if not failed:
        return result
    if is_rank_0():
        where = "" if len(failed) == len(errors) else f"rank {failed[0]}: "
        print(f"{Path(sys.argv[0]).name}: error: {where}{errors[failed[0]]}", file=sys.stderr, flush=True)
    _leave(2)


def is_rank_0():
    return not dist.is_initialized() or dist.get_rank() == 0


def _leave(code):
    if dist.is_initialized():
        disconnect()
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    """Prints on one rank what argparse would print on each."""

    def error(self, message):
        raise ValueError(f"{message} (--help shows all options)")

    def _print_message(self, message, file=None):
        if is_rank_0():
            super()._print_message(message, file)

    def exit(self, status=0, message=None):
        _leave(status)


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
    add("--seed", type=_not_negative(int), default=0, help="of weights and batches (default 0)")
    add("--checkpoint", metavar="DIR", help="folder of checkpoints; go on from the newest complete one in it, and save "
        f"on SIGTERM and SIGUSR1: exit code {resume.PREEMPTED}, and the same command goes on")
    add("--save-every", type=_positive(int), metavar="N", help="steps between two of them (default 100)")
    add("--keep", type=_not_negative(int), metavar="N", help="how many of them, the newest; 0: all (default 3)")
    add("--resume-from", type=_positive(int), metavar="STEP", help="go on from this one; later ones are set aside")
    add("--force", action="store_true", help="go on from a checkpoint of other data, or another seed or batch size")
    add("--timeout", type=_positive(float), metavar="SECONDS", help="that a rank waits for another one "
        f"(default {TIMEOUT_S})")
    add("--data", metavar="PATH", help=f"a text file, or a folder of them, up to {DATA_BYTES // 10**6} MB "
        f"(default: {STDLIB_BYTES // 10**6} MB of the source of Python's standard library)")

    def parse():
        args = parser.parse_args(arguments)
        cli.check_at_least_1(args, ("steps", "batch_size", "accumulate"), parser.error)
        if args.seed >= 2**63:
            parser.error(f"argument --seed: {args.seed} is too large, torch takes at most 2**63 - 1")
        block_size = MODELS[args.model].block_size
        args.sequence_length = args.sequence_length or min(128, block_size)
        if args.sequence_length > block_size:
            parser.error(f"argument --sequence-length: {args.sequence_length} is too long, model {args.model} takes at "
                         f"most {block_size}")
        if args.checkpoint == "":
            parser.error("argument --checkpoint: it names no folder")
        for option in ("save_every", "keep", "resume_from"):
            if getattr(args, option) is not None and not args.checkpoint:
                parser.error(f"argument --{option.replace('_', '-')}: there is no --checkpoint DIR to save in")
        if args.timeout and args.timeout > MOST_TIMEOUT_S:
            parser.error(f"argument --timeout: {args.timeout:g} is too long, it must be at most {MOST_TIMEOUT_S}")
        args.given = {option for option in ("lr", "weight_decay") if getattr(args, option) is not None}
        defaults = {"save_every": 100, "keep": 3, "timeout": TIMEOUT_S, "weight_decay": WEIGHT_DECAY,
                    "lr": MODELS[args.model].lr}
        for option, default in defaults.items():
            if getattr(args, option) is None:
                setattr(args, option, default)
        return args
    return on_all_ranks(parse)


def _positive(kind):
    return _number(kind, lambda value: value > 0, "positive")


def _not_negative(kind):
    return _number(kind, lambda value: value >= 0, "non-negative")


def _number(kind, is_allowed, description):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (is_allowed(value) and value < math.inf):
            raise argparse.ArgumentTypeError(f"must be a {description} {'whole ' if kind is int else ''}number, "
                                             f"not {text!r}")
        return value
    return parse


def warmup_then_cosine(steps):
    """For LambdaLR: the learning rate's factor, up to 1 in the first fifth (at most 100 steps), then down to 0.1."""
    warmup = max(1, min(steps // 5, 100))

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)  # 0 to 1
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
    return factor


@torch.no_grad()
def evaluate(model, validation):
    """Mean loss over the validation sequences of all ranks, in nats a byte: a float, the same on every rank."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # sum of losses, sequences
    for tokens, targets in validation:
        total += torch.stack([model(tokens, targets).double(), total.new_ones(())]) * len(tokens)
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


class Checkpoints:
    """Saves a checkpoint every args.save_every steps and after the last, if args.checkpoint names a folder for them.

    And when a rank is told to stop, by SIGTERM or SIGUSR1: all save after the same step, and exit with PREEMPTED.

    `first_step`: how many steps were done when the newest complete one was saved, which is loaded; 0 if there is none.
    The position in the data is the number of the step. Random states go on where they were on the same number of ranks.
    """

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args, self.rank, self.model, self.optimizer, self.scheduler = args, rank, model, optimizer, scheduler
        self.first_step = self.steps_done = 0
        if args.checkpoint:
            on_all_ranks(self._check_folder)
            on_all_ranks(self._resume)
            self.stop_signal = resume.StopSignal(optimizer, args.timeout)

    def step_done(self):
        """Counts a step, and saves if it is time to; after a signal it doesn't return. Collective."""
        self.steps_done += 1
        if not self.args.checkpoint:
            return
        is_last = self.steps_done == self.args.steps
        signal_name = self.stop_signal.agreed()
        if signal_name or is_last or self.steps_done % self.args.save_every == 0:
            on_all_ranks(self._save)
        if signal_name and not is_last:
            if is_rank_0():
                print(f"stopped by {signal_name} after step {self.steps_done}, which is saved: the same command goes "
                      f"on (exit code {resume.PREEMPTED})", flush=True)
            _leave(resume.PREEMPTED)

    def _save(self):
        random = {"cpu": torch.get_rng_state()}
        if self.rank.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.rank.device)
        extra = {"step": self.steps_done, "scheduler": self.scheduler.state_dict(), "random": random,
                 "rank": self.rank.rank, "world_size": self.rank.world_size,
                 "settings": resume.settings_of(self.args, self.rank.world_size)}
        path = resume.path_of(self.args.checkpoint, self.steps_done)
        try:
            checkpoint.save(path, self.model, self.optimizer, extra)
        except checkpoint.CheckpointError as error:
            raise ValueError(str(error)) from None
        if is_rank_0():
            resume.remove_old(self.args.checkpoint, self.args.keep)

    def _check_folder(self):
        """Now, and not at the first save."""
        def fail(message):
            raise ValueError(message)
        cli.check_writable("--checkpoint", Path(self.args.checkpoint) / "step", fail)

    def _resume(self):
        step, extra, damage = self._load()
        if step is None:
            return
        self.first_step = self.steps_done = extra["step"]
        self.scheduler.load_state_dict(extra["scheduler"])
        changed = self._changes(extra.get("settings", {}))
        resume.take_hyperparameters(self.args, self.optimizer, self.scheduler)
        if (extra["rank"], extra["world_size"]) == self.rank[:2]:
            torch.set_rng_state(extra["random"]["cpu"])
            if "cuda" in extra["random"] and self.rank.device.type == "cuda":
                torch.cuda.set_rng_state(extra["random"]["cuda"], self.rank.device)
        if is_rank_0():
            later = [other for other in self.steps_found if other > step]
            aside = ", and later ones set aside" if later else ""
            print(f"resumed from {resume.path_of(self.args.checkpoint, step)}{aside}{damage}", flush=True)
            if changed:
                print("changed since then: " + ", ".join(f"{option} {before} -> {now}" for option, (before, now)
                                                         in changed.items()), flush=True)
            if self.first_step >= self.args.steps:
                print(f"nothing is left to do: --steps {self.args.steps}", flush=True)
            try:
                resume.set_aside(self.args.checkpoint, later)
            except OSError as error:
                raise ValueError(f"--checkpoint {self.args.checkpoint}: {error.strerror}: {error.filename}") from None

    def _steps_to_try(self):
        """-> steps of the checkpoints that this run may go on from, the first choice first; the same on every rank."""
        folder, wanted = self.args.checkpoint, self.args.resume_from
        self.steps_found = resume.steps_in(folder)  # what another run may save from here on is none of these
        everything = [resume.complete(folder)]
        dist.broadcast_object_list(everything, src=0)
        steps = everything[0]
        if wanted is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # torchrun's restart goes on
            return steps
        if wanted not in steps:
            there_are = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"argument --resume-from: {folder} has no complete checkpoint of step {wanted}, but of "
                             f"{there_are}")
        return [wanted]

    def _load(self):
        """The newest complete checkpoint, or, where that is damaged, the one before -> its step or None, its `extra`,
        and what to say of damage."""
        first_error = None
        for step in self._steps_to_try():
            try:
                extra = checkpoint.load(resume.path_of(self.args.checkpoint, step), self.model, self.optimizer)
            except checkpoint.DamagedCheckpoint as error:
                first_error = first_error or error
                continue
            except checkpoint.CheckpointError as error:
                first_error = first_error or error
                break
            return step, extra, f": {first_error}" if first_error else ""
        if first_error:
            raise ValueError(str(first_error))
        return None, None, ""

    def _changes(self, before):
        """-> {option: (before, now)}. Raises ValueError where a step would see other data, unless --force is given."""
        args, group = self.args, self.optimizer.param_groups[0]
        before = {**before, "--lr": self.scheduler.base_lrs[0], "--weight-decay": group["weight_decay"]}
        args.lr = args.lr if "lr" in args.given else before["--lr"]
        args.weight_decay = args.weight_decay if "weight_decay" in args.given else before["--weight-decay"]
        changed = resume.changes(before, resume.settings_of(args, self.rank.world_size))
        refused = [f"{option} is {changed[option][1]}, the run's is {changed[option][0]}"
                   for option in resume.DATA_ORDER if option in changed]
        if refused and not args.force:
            raise ValueError(f"--checkpoint {args.checkpoint} is of a run with other data: {'; '.join(refused)}: "
                             "--force goes on nevertheless")
        return changed


class Report:
    """What a run tells its reader, on rank 0: a progress bar, or, where no terminal has room for that, lines.

    Losses are means over the ranks, over the micro-batches, and over the steps since the last look at them.
    """

    def __init__(self, args, rank, model, first_step=0):
        self.args, self.rank, self.first_step = args, rank, first_step
        self.is_printing = rank.rank == 0
        self.console = rich.console.Console(highlight=False, soft_wrap=True)
        self.loss_sum = torch.zeros((), device=rank.device)  # of this rank, since the last look
        self.steps_done = self.steps_seen = first_step
        self.line_every = max(REPORT_EVERY, args.steps // 20 // REPORT_EVERY * REPORT_EVERY)
        takes_bar = self.console.is_terminal and not self.console.is_dumb_terminal and self.console.width >= BAR_WIDTH
        self.bar = rich.progress.Progress(
            rich.progress.TextColumn("step"), rich.progress.MofNCompleteColumn(), rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[speed]}"), rich.progress.TimeRemainingColumn(),
            console=self.console, disable=not (self.is_printing and takes_bar))
        self._print_conditions(model)

    def __enter__(self):
        self.bar.start()
        self.task = self.bar.add_task("", total=self.args.steps, completed=self.first_step, speed="")
        self.started_at = self.seen_at = time.perf_counter()
        return self

    def __exit__(self, *exception):
        self.bar.stop()

    def add_loss(self, loss):
        """One micro-batch's part of the step's loss, a scalar tensor. Nothing waits for it here."""
        self.loss_sum += loss.detach()

    def step_done(self):
        """Counts a step. After the first, the last and every REPORT_EVERYth, averages the loss. Collective."""
        self.steps_done += 1
        self.bar.advance(self.task)
        if self.steps_done in (self.first_step + 1, self.args.steps) or self.steps_done % REPORT_EVERY == 0:
            self._look()

    def validation(self, when, loss):
        """Prints a validation loss in nats a byte; `when` is "before" or "after"."""
        self._print(f"validation loss {when}: {loss:.4f}")

    def _look(self):
        dist.all_reduce(self.loss_sum)
        steps = self.steps_done - self.steps_seen
        loss = self.loss_sum.item() / steps / self.rank.world_size  # waits for the device: the clock is right after it
        now = time.perf_counter()
        seconds = (now - self.seen_at) / steps
        self.loss_sum.zero_()
        self.steps_seen, self.seen_at = self.steps_done, now
        speed = f"loss {loss:.4f}  {self._tokens_per_step() / seconds:,.0f} tokens/s  {seconds * 1000:,.1f} ms/step"
        self.bar.update(self.task, speed=speed)
        is_first, is_last = self.steps_done == self.first_step + 1, self.steps_done == self.args.steps
        if is_last:
            self.bar.stop()
        if is_last or self.bar.disable and (is_first or self.steps_done % self.line_every == 0):
            self._print(f"step {self.steps_done:>{len(str(self.args.steps))}}/{self.args.steps}  {speed}")
        if is_last:
            self._print(f"{self.args.steps - self.first_step} steps in {now - self.started_at:.1f} s")

    def _tokens_per_step(self):
        return self.rank.world_size * self.args.accumulate * self.args.batch_size * self.args.sequence_length

    def _print_conditions(self, model):
        args, (_, world_size, device, backend) = self.args, self.rank
        script = Path(sys.argv[0]).resolve()
        cpu = f"CPU with {torch.get_num_threads()} thread(s)"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        n_params = sum(param.numel() for param in model.parameters())
        python = f"the source of the standard library of Python {platform.python_version()}"
        self._print(f"{script.parent.name}/{script.name}: {world_size} rank(s) with {backend}, each on {name}, "
                    f"torch {torch.__version__}")
        self._print(f"model {args.model}, {n_params:,} parameters, {args.dtype}; lr {args.lr:g}, weight decay "
                    f"{args.weight_decay:g}, clip {args.clip:g}, seed {args.seed}")
        self._print(f"batch {world_size} x {args.accumulate} x {args.batch_size} x {args.sequence_length} (ranks x "
                    f"micro-batches x sequences x bytes) of {args.data or python}")

    def _print(self, line):
        if self.is_printing:
            self.console.print(line, markup=False)
            self.console.file.flush()  # torchrun reads it through a pipe
