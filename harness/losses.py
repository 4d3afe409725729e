"""Losses of the variants that keep or send fewer bits, beside stage 4's: the same text, the same steps, several seeds.

    python -m harness.losses [--steps 300] [--seeds 3] [--ranks 2] [--json measured/losses.json]

A small GPT on the source of Python's standard library; after the last step the loss on the part that is kept for that.
`--json results/losses.json` puts the result there, and `make report` its table into variants/README.md.
"""

import dataclasses
import statistics

import torch

from harness import FOUR, command_line, corpus, results
from harness.examine import Settings, describe, make_batches, make_model
from harness.results import LossConditions, LossResult, LossRow
from harness.rows import ddp, ddp_summed_in_bf16, stage
from harness.tables import loss_sheet, sheet_text
from harness.workers import Workers, on_rank_0

SETTINGS = Settings("nano", batch_size=8, sequence_length=64)
BETAS = 0.95, 0.999
FP32, BF16 = "stage 4, fp32", "stage 4, bf16"
CONFIGURATIONS = {  # name -> how it is built, and the row that it is compared with, whose name says the dtype
    FP32: (stage(FOUR), FP32),
    "DDP": (ddp, FP32),
    "DDP, summed in bf16": (ddp_summed_in_bf16, FP32),
    "wire16": (stage("variants.wire16"), FP32),
    "moments16": (stage("variants.moments16"), FP32),
    BF16: (stage(FOUR), BF16),
    "remainder16, bf16": (stage("variants.remainder16"), BF16),
}


def loss_of(rank, name, seed, n_steps, beta2):
    """-> the loss on the validation text, of this rank's part of it."""
    build, base = CONFIGURATIONS[name]
    settings = SETTINGS._replace(seed=seed, steps=n_steps)
    model = make_model(settings, rank, "bfloat16" if base == BF16 else "float32")
    training = build(model, {"lr": 3e-3, "betas": (0.9, beta2), "weight_decay": 0.1})
    for batch in make_batches(settings, rank)[:n_steps]:
        training.step(batch)
    training.finish()
    sizes = SETTINGS.batch_size, SETTINGS.sequence_length, *rank[:3]
    _, validation = corpus.split(corpus.load_bytes())
    with torch.no_grad():
        return statistics.mean(model(*part).item() for part in corpus.validation_batches(validation, *sizes))


def measure(workers, n_steps, n_seeds):
    """-> LossResult."""
    found = on_rank_0(workers, describe, SETTINGS._replace(steps=n_steps))
    conditions = LossConditions(**{field.name: getattr(found, field.name) for field in
                                   dataclasses.fields(LossConditions)})
    return LossResult(conditions, [
        LossRow(name, base, beta2, [statistics.mean(workers.run(loss_of, name, seed, n_steps, beta2))
                                        for seed in range(n_seeds)])
        for beta2 in BETAS for name, (_, base) in CONFIGURATIONS.items()])


def main():
    parser = command_line.Parser("losses", __doc__)
    for option, default, what in (("--steps", 300, "of each run"), ("--seeds", 3, "of model and text"),
                                  ("--ranks", 2, "processes on this machine")):
        parser.add_argument(option, type=command_line.COUNT, default=default, help=f"{what} (default {default})")
    command_line.add_json(parser, "measured/losses.json")
    args = parser.parse_args()
    command_line.check_writable("--json", args.json, parser.error)
    with Workers(args.ranks, timeout_s=600) as workers:
        result = measure(workers, args.steps, args.seeds)
    command_line.write_and_show(args.json, results.to_json(result), parser.error,
                                lambda: print(sheet_text(loss_sheet(result))))


if __name__ == "__main__":
    main()
