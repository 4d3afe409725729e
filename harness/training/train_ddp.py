"""Trains a small GPT with torch's own data parallelism: the reference, whose losses every stage's train.py must print.

    torchrun --standalone --nproc-per-node 2 harness/training/train_ddp.py [--steps 200] [--model tiny] …
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

import harness.training.train as workload


def main():
    rank = workload.connect()  # one GPU a rank and NCCL, or else the CPU and gloo
    args = workload.parse_args(__doc__)
    model = DistributedDataParallel(workload.build_model(args, rank), gradient_as_bucket_view=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, workload.warmup_then_cosine(args.steps))

    run = workload.Run(args, rank, model.module, optimizer, scheduler)  # loads the newest checkpoint
    for step in run.steps():  # prints the loss and saves after some of them
        for micro in range(args.accumulate):
            is_last = micro == args.accumulate - 1
            with nullcontext() if is_last else model.no_sync():  # gradients are sent once per step
                tokens, targets = run.batch(step, micro)  # (B, T), (B, T)
                loss = model(tokens, targets) / args.accumulate
                loss.backward()
            run.add_loss(loss)
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    workload.disconnect()


if __name__ == "__main__":
    main()
