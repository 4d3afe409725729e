"""Trains variants on text: measures the losses of variants with fewer bits, and how far runs on 1 to 8 ranks differ.

    python -m harness.measuring.losses [--steps 300] [--seeds 3] [--ranks 2] [--json measured/losses.json]

It trains a small GPT on the source of Python's standard library. The loss is measured after the last step, on text that
no step has seen. Then DDP, stage 4 and variants/same_bits.py train on 1, 2, 4 and 8 ranks. `--json results/losses.json`
puts the result there. `make report` writes the losses into variants/README.md, and draws the other differences for
docs/same_bits.md.
"""

import contextlib
import statistics

import torch

from harness import STAGE_4
from harness.measuring.examine import Settings, adamw, make_batches, make_model
from harness.publishing.tables import Report, column, made_here, name_column, save_and_show, sheet_of
from harness.ranks import command_line
from harness.ranks.workers import Workers, on_rank_0
from harness.training import corpus
from harness.training.rows import ddp, ddp_summed_in_bf16, stage

SETTINGS = Settings("nano", batch_size=8, sequence_length=64)
BETAS = 0.95, 0.999
FP32, BF16 = "stage 4, fp32", "stage 4, bf16"
CONFIGURATIONS = {  # name -> (build, name of the row of the same dtype that it is compared with)
    FP32: (stage(STAGE_4), FP32),
    "DDP": (ddp, FP32),
    "DDP, summed in bf16": (ddp_summed_in_bf16, FP32),
    "wire16": (stage("variants.wire16"), FP32),
    "moments16": (stage("variants.moments16"), FP32),
    BF16: (stage(STAGE_4), BF16),
    "remainder16, bf16": (stage("variants.remainder16"), BF16),
}


def loss_of(rank, name, seed, n_steps, beta2):
    """Train a configuration. Returns the loss on this rank's part of the validation text."""
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
    """Train all configurations. Returns {(name, beta2): loss by seed}, where a loss is the mean over the ranks."""
    losses = {}
    for beta2 in BETAS:
        for name in CONFIGURATIONS:
            losses[name, beta2] = [statistics.mean(workers.run(loss_of, name, seed, n_steps, beta2))
                                   for seed in range(n_seeds)]
    return losses


def loss_sheet(losses, bases, n_steps):
    """Make the table of losses, {(name, beta2): loss by seed}. bases: {name: the name that it is compared with}."""
    def difference(name, beta2):
        pairs = zip(losses[name, beta2], losses[bases[name], beta2])
        return " ".join(f"{loss - base_loss:+.4f}" for loss, base_loss in pairs)
    columns = {"name": name_column(str)}
    for beta2 in dict.fromkeys(beta2 for _, beta2 in losses):
        columns[f"loss, beta2 {beta2}"] = column(
            f"beta2 {beta2}\nloss", lambda name, beta2=beta2: losses[name, beta2], "measured", ".4f")
        columns[f"difference, beta2 {beta2}"] = column(
            "more, by seed", lambda name, beta2=beta2: difference(name, beta2), "measured")
    return sheet_of(f"Losses after {n_steps} steps", dict.fromkeys(name for name, _ in losses), columns, [
        "Loss: nats a byte of text that no step has seen, the median over the seeds. More: than stage 4 of the same "
        "dtype, same seed."])


# ------------------------------------------------------------------------- The same steps on 1, 2, 4 and 8 ranks


LEAVES = 8  # micro-batches of a step, whichever rank computes them
RANKS = 1, 2, 4, 8
MAX_NORM = 1.0
BY_RANKS = Settings("nano", batch_size=2, sequence_length=32, steps=200)
SAME_BITS = "same_bits"
METHODS = {"DDP": ddp, "stage 4": stage(STAGE_4), SAME_BITS: stage("variants.same_bits", leaves=LEAVES)}


def params_by_step(rank, method, n_steps):
    """Train with `method`. Returns all parameters after each step, (n_steps, n), as an array of numpy."""
    training = METHODS[method](make_model(BY_RANKS, rank, "float32"), adamw(BY_RANKS))
    text, _ = corpus.split(corpus.load_bytes())
    n_own = LEAVES // rank.world_size
    own = [corpus.Batches(text, BY_RANKS.batch_size, BY_RANKS.sequence_length, leaf, LEAVES, BY_RANKS.seed)
           for leaf in range(rank.number * n_own, (rank.number + 1) * n_own)]
    steps = []
    for step in range(n_steps):
        for leaf in own:
            with contextlib.nullcontext() if leaf is own[-1] else training.no_sync():
                loss = training.forward(*leaf.batch(step))
                (loss if method == SAME_BITS else loss / n_own).backward()  # same_bits divides by the leaves itself
        clip = getattr(training.optimizer, "clip_grad_norm_", None)
        if clip:
            clip(MAX_NORM)
        else:
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), MAX_NORM)
        training.update()
        training.zero_grad()
        steps.append(torch.cat([param.flatten() for param in training.full_params()]))
    return torch.stack(steps).numpy()


def measure_differences(n_steps):
    """Train with each method on 1, 2, 4 and 8 ranks. Returns {name: largest difference from 1 rank, by step}."""
    alone = {}
    differences = {}
    for n_ranks in RANKS:
        with Workers(n_ranks, timeout_s=600) as workers:
            for method in METHODS:
                steps = on_rank_0(workers, params_by_step, method, n_steps)
                if n_ranks == 1:
                    alone[method] = steps
                else:
                    by_step = abs(steps.astype(float) - alone[method]).max(axis=1)
                    differences[f"{method}, {n_ranks} ranks"] = by_step.tolist()
    return differences


def describe(rank):
    """Return the ranks, the model and the batch of the losses in words."""
    numel = sum(param.numel() for param in make_model(SETTINGS, rank, "float32").parameters())
    return " · ".join([
        f"{rank.backend}, {rank.world_size} ranks", f"{SETTINGS.model}: {numel:,} parameters, AdamW",
        f"a rank's batch: {SETTINGS.batch_size} x {SETTINGS.sequence_length} bytes of the source of Python's standard "
        "library"])


def main():
    parser = command_line.Parser("losses", __doc__)
    for option, default, what in (("--steps", 300, "of each run"), ("--seeds", 3, "of model and text"),
                                  ("--ranks", 2, "processes on this machine")):
        parser.add_argument(option, type=command_line.COUNT, default=default, help=f"{what} (default {default})")
    command_line.add_json(parser, "measured/losses.json")
    args = parser.parse_args()
    command_line.check_writable("--json", args.json, parser.error)
    with Workers(args.ranks, timeout_s=600) as workers:
        losses = measure(workers, args.steps, args.seeds)
        conditions = on_rank_0(workers, describe)
    differences = measure_differences(min(args.steps, BY_RANKS.steps))
    sheet = loss_sheet(losses, {name: base for name, (_, base) in CONFIGURATIONS.items()}, args.steps)
    # The picture draws the raw numbers of each step.
    report = Report(made_here(), {"losses": sheet}, conditions, drawn={"differences": differences})
    save_and_show(args.json, report, parser.error)


if __name__ == "__main__":
    main()
