"""Trains a small GPT with torch's own data parallelism: the reference, whose losses every stage's train.py must print.

    torchrun --standalone --nproc-per-node 2 harness/train_ddp.py [--steps 200] [--model tiny] [--accumulate 1] …
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, wherever this is run from

import harness.train as workload


def main():
    rank = workload.connect()  # one GPU a rank and NCCL, or else the CPU and gloo
    args = workload.parse_args(__doc__)
    batches, validation = workload.load_data(args, rank)
    model = DistributedDataParallel(workload.build_model(args, rank), gradient_as_bucket_view=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, workload.warmup_then_cosine(args.steps))
    checkpoints = workload.Checkpoints(args, rank, model.module, optimizer, scheduler)  # resumes from the newest

    report = workload.Report(args, rank, model, checkpoints.first_step)
    report.validation("before", workload.evaluate(model, validation))
    with report:
        for step in range(checkpoints.first_step, args.steps):
            for micro in range(args.accumulate):
                is_last = micro == args.accumulate - 1
                with nullcontext() if is_last else model.no_sync():  # gradients travel once a step
                    tokens, targets = batches.batch(step * args.accumulate + micro)  # (B, T), (B, T)
                    loss = model(tokens, targets) / args.accumulate
                    loss.backward()
                report.add_loss(loss)
            if args.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            report.step_done()
            checkpoints.step_done()
    report.validation("after", workload.evaluate(model, validation))
    workload.disconnect()


if __name__ == "__main__":
    main()
