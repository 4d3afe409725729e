"""Losses of the variants that keep or send fewer bits, beside fp32: the same text, the same steps, several seeds.

    python -m harness.measure.losses [--steps 300] [--seeds 3] [--ranks 2]

A small GPT on the source of Python's standard library; after the last step the loss on the part that is kept for that.
Prints a table of Markdown: medians over the seeds, and by how much each differs from fp32 with the same seed.
"""

import argparse
import functools
import statistics
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.rows.training import Training
from harness.rows.ways import stage
from harness.run import command_line
from harness.run.workers import Workers
from harness.train import corpus
from harness.train.gpt import GPT, MODELS

BATCH_SIZE, LENGTH = 8, 64  # of each rank


def bf16_sum(_, bucket):
    """What torch's bf16_compress_hook does, which refuses gloo."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp(model, adamw, hook=None):
    wrapped = DistributedDataParallel(model)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return Training(model, wrapped, torch.optim.AdamW(model.parameters(), **adamw))


WAYS = {
    "stage 4, fp32": stage("stage4_overlap"),
    "DDP": ddp,
    "DDP, summed in bf16": functools.partial(ddp, hook=bf16_sum),
    "wire16": stage("variants.wire16"),
    "moments16": stage("variants.moments16"),
}


def loss_of(rank, name, seed, n_steps, beta2):
    """-> the loss on the validation text, of this rank's part of it."""
    torch.manual_seed(seed)
    model = GPT(MODELS["nano"])
    training = WAYS[name](model, {"lr": 3e-3, "betas": (0.9, beta2), "weight_decay": 0.1})
    train, validation = corpus.split(corpus.load_bytes())
    batches = corpus.Batches(train, BATCH_SIZE, LENGTH, rank.rank, rank.world_size, seed=seed)
    for step in range(n_steps):
        training.step(batches.batch(step))
    training.finish()
    parts = corpus.validation_batches(validation, BATCH_SIZE, LENGTH, rank.rank, rank.world_size)
    with torch.no_grad():
        return statistics.mean(model(*part).item() for part in parts)


def main():
    fail = functools.partial(command_line.fail, "losses")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    for option, default, what in (("--steps", 300, "of each run"), ("--seeds", 3, "of model and text"),
                                  ("--ranks", 2, "processes on this machine")):
        parser.add_argument(option, type=int, default=default, help=f"{what} (default {default})")
    args = parser.parse_args()
    if min(args.steps, args.seeds, args.ranks) < 1:
        fail("--steps, --seeds and --ranks must be at least 1")
    print("| after " + f"{args.steps} steps | beta2 | loss | more than fp32, by seed |\n|---|--:|--:|--:|")
    with Workers(args.ranks, timeout_s=600) as workers:
        for beta2 in (0.95, 0.999):
            of_fp32 = None
            for name in WAYS:
                losses = [statistics.mean(workers.run(loss_of, name, seed, args.steps, beta2))
                          for seed in range(args.seeds)]
                of_fp32 = of_fp32 or losses
                more = " ".join(f"{loss - theirs:+.4f}" for loss, theirs in zip(losses, of_fp32))
                print(f"| {name} | {beta2} | {statistics.median(losses):.4f} | {more} |")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
