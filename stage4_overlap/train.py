"""Trains a small GPT on real text with the DistributedOptimizer of this folder.

The folders stage1_… to stage4_… have the same training loop, with another optimizer each.

    torchrun --standalone --nproc-per-node 2 FOLDER/train.py [--steps 200] [--model tiny] [--accumulate 1] …
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, wherever this is run from

import harness.training.train as workload
from stage4_overlap import DistributedOptimizer


def main():
    rank = workload.connect()  # NCCL and one GPU per rank, or else gloo and the CPU
    args = workload.parse_args(__doc__)
    model = workload.build_model(args, rank)

    optimizer = DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr,
                                     weight_decay=args.weight_decay, fused=True)
    optimizer.prefetch_params(model)  # parameters are sent during the next forward pass
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, workload.warmup_then_cosine(args.steps))

    run = workload.Run(args, rank, model, optimizer, scheduler)  # loads the newest checkpoint
    for step in run.steps():  # after some steps it prints the loss, and writes a checkpoint
        for micro in range(args.accumulate):
            is_last = micro == args.accumulate - 1
            with nullcontext() if is_last else optimizer.no_sync():  # gradients are sent once per step
                tokens, targets = run.batch(step, micro)  # (B, T), (B, T)
                loss = model(tokens, targets) / args.accumulate
                loss.backward()
            run.add_loss(loss)
        if args.clip:
            optimizer.clip_grad_norm_(args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    workload.disconnect()


if __name__ == "__main__":
    main()
