"""Trains variants on text: measures the losses of variants with fewer bits, and how far runs on 1 to 8 ranks differ.

    python -m harness.measuring.losses [--json measured/losses.json]

The program trains a small GPT on the source of Python's standard library, on two ranks. After the last step it measures
the loss on text that no step has seen. Then DDP, stage 4 (the optimizer in stage4_overlap/) and variants/same_bits.py
train on 1, 2, 4 and 8 ranks, and the program measures by how much the parameters differ from those on 1 rank.

With --json results/losses.json, `make report` writes the losses into variants/README.md, and draws the differences for
docs/same_bits.md.
"""
# The words of this file:
#   variant        an optimizer in a file of variants/
#   configuration  a way to train: DDP, stage 4, or a variant
#   build          a function of a model and AdamW's arguments, which returns a Training
#   Training       an object with a model, an optimizer, and the parts of a step as methods
#   rank           a Rank (harness/ranks/meeting.py): the number of this process, its device, the number of all ranks
#   workers        the ranks: workers.run(function, *arguments) calls function(rank, *arguments) on each of them, and
#                  returns the results by rank; on_rank_0 does the same, and returns rank 0's result

import contextlib
import statistics

import torch

from harness import STAGE_4
from harness.measuring.examine import Settings, adamw, clip, make_batches, make_model
from harness.publishing.tables import Report, column, made_here, name_column, save_and_show, sheet_of
from harness.ranks import command_line
from harness.ranks.workers import Workers, on_rank_0
from harness.training import corpus
from harness.training.rows import ddp, ddp_summed_in_bf16, stage

N_RANKS = 2
SETTINGS = Settings("nano", batch_size=8, sequence_length=64, steps=300)
SEEDS = range(3)  # of model and text
BETAS2 = 0.95, 0.999  # AdamW's beta2, by turns: the decay rate of its second moment
FP32 = "stage 4, fp32"
BF16 = "stage 4, bf16"
# Name -> (build, base). The base is the configuration with whose loss this one's is compared: stage 4, with parameters
# of the same dtype.
CONFIGURATIONS = {
    FP32: (stage(STAGE_4), FP32),
    "DDP": (ddp, FP32),
    "DDP, summed in bf16": (ddp_summed_in_bf16, FP32),
    "wire16": (stage("variants.wire16"), FP32),
    "moments16": (stage("variants.moments16"), FP32),
    BF16: (stage(STAGE_4), BF16),
    "remainder16, bf16": (stage("variants.remainder16"), BF16),
}


def loss_of(rank, name, seed, beta2):
    """Train the configuration `name`. Returns the loss on this rank's part of the validation text."""
    build, base = CONFIGURATIONS[name]
    settings = SETTINGS._replace(seed=seed)
    model = make_model(settings, rank, "bfloat16" if base == BF16 else "float32")
    training = build(model, {"lr": 3e-3, "betas": (0.9, beta2), "weight_decay": 0.1})
    for batch in make_batches(settings, rank)[:settings.steps]:
        training.step(batch)
    training.finish()
    _, validation = corpus.split(corpus.load_bytes())  # text to train on, text that no step has seen
    batches = corpus.validation_batches(validation, settings.batch_size, settings.sequence_length, rank.number,
                                        rank.world_size, rank.device)
    with torch.no_grad():
        return statistics.mean(model(tokens, targets).item() for tokens, targets in batches)


def measure_losses(workers):
    """Train all configurations. Returns {(name, beta2): [loss, …] by seed}. A loss is the mean over the ranks."""
    losses = {}
    for beta2 in BETAS2:
        for name in CONFIGURATIONS:
            losses[name, beta2] = [statistics.mean(workers.run(loss_of, name, seed, beta2)) for seed in SEEDS]
    return losses


def loss_sheet(losses):
    """Make the table of losses. `losses`: what `measure_losses` returns."""
    def losses_with(beta2):
        """Return a function of a configuration's name: its losses with this beta2, by seed."""
        return lambda name: losses[name, beta2]

    def differences_with(beta2):
        """Return a function of a configuration's name: by how much its loss exceeds its base's loss, by seed."""
        def differences(name):
            _, base = CONFIGURATIONS[name]
            pairs = zip(losses[name, beta2], losses[base, beta2])
            return " ".join(f"{loss - base_loss:+.4f}" for loss, base_loss in pairs)
        return differences
    columns = {"name": name_column(str)}
    for beta2 in BETAS2:
        columns[f"loss, beta2 {beta2}"] = column(f"beta2 {beta2}\nloss", losses_with(beta2), "measured", ".4f")
        columns[f"difference, beta2 {beta2}"] = column("more, by seed", differences_with(beta2), "measured")
    return sheet_of(f"Losses after {SETTINGS.steps} steps", CONFIGURATIONS, columns, [
        "Loss: nats a byte of text that no step has seen, the median over the seeds. More: than stage 4 of the same "
        "dtype, same seed."])


# ------------------------------------------------------------------------------- The same steps on 1, 2, 4 and 8 ranks


# A leaf is a micro-batch. A step has LEAVES leaves on all ranks together, so any number of RANKS trains on the same
# data. variants/same_bits.py adds the gradients of the leaves in the same order on any number of ranks, so its
# parameters should be the same to the bit. DDP and stage 4 add in other orders, and so have other rounding errors.
LEAVES = 8
RANKS = 1, 2, 4, 8
MAX_NORM = 1.0  # gradients are clipped to this norm
BY_RANKS = Settings("nano", batch_size=2, sequence_length=32, steps=200)
SAME_BITS = "same_bits"
# Name -> build.
METHODS = {"DDP": ddp, "stage 4": stage(STAGE_4), SAME_BITS: stage("variants.same_bits", leaves=LEAVES)}


def params_by_step(rank, method):
    """Train with METHODS[method]. Returns all parameters after each step, (steps, numel), as an array of numpy."""
    training = METHODS[method](make_model(BY_RANKS, rank, "float32"), adamw(BY_RANKS))
    text, _ = corpus.split(corpus.load_bytes())
    n_own_leaves = LEAVES // rank.world_size
    first_leaf = rank.number * n_own_leaves
    batches_of_leaves = [
        corpus.Batches(text, BY_RANKS.batch_size, BY_RANKS.sequence_length, leaf, LEAVES, BY_RANKS.seed)
        for leaf in range(first_leaf, first_leaf + n_own_leaves)]
    # The gradient of a step should be the mean over all leaves. same_bits divides by the number of leaves itself. DDP
    # and stage 4 divide by the number of ranks, so here their losses are divided by the leaves of a rank.
    divisor = 1 if method == SAME_BITS else n_own_leaves
    params_after = []
    for step in range(BY_RANKS.steps):
        for batches in batches_of_leaves:
            is_last = batches is batches_of_leaves[-1]
            # Gradients are sent in the last backward pass of a step. In earlier passes they only add up.
            context = contextlib.nullcontext() if is_last else training.no_sync()
            with context:
                loss = training.forward(*batches.batch(step))
                (loss / divisor).backward()
        clip(training, MAX_NORM)
        training.update()
        training.zero_grad()
        params_after.append(torch.cat([param.flatten() for param in training.full_params()]))
    return torch.stack(params_after).numpy()


def measure_differences():
    """Train with each method on 1, 2, 4 and 8 ranks. Returns {"method, n ranks": [number, …] by step}.

    A number is the largest difference of any parameter from its value after the same step on 1 rank.
    """
    params_of_1_rank = {}  # method -> what `params_by_step` returns on 1 rank
    differences = {}
    for n_ranks in RANKS:
        with Workers(n_ranks, timeout_s=600) as workers:
            for method in METHODS:
                params = on_rank_0(workers, params_by_step, method)
                if n_ranks == 1:
                    params_of_1_rank[method] = params.astype(float)
                else:
                    by_step = abs(params - params_of_1_rank[method]).max(axis=1)
                    differences[f"{method}, {n_ranks} ranks"] = by_step.tolist()
    return differences


def describe(rank):
    """Return the conditions of the losses in words: the ranks, the model and the batch."""
    numel = sum(param.numel() for param in make_model(SETTINGS, rank, "float32").parameters())
    return " · ".join([
        f"{rank.backend}, {rank.world_size} ranks", f"{SETTINGS.model}: {numel:,} parameters, AdamW",
        f"a rank's batch: {SETTINGS.batch_size} x {SETTINGS.sequence_length} bytes of the source of Python's standard "
        "library"])


def main():
    parser = command_line.Parser("losses", __doc__)
    command_line.add_json(parser, "measured/losses.json")
    args = parser.parse_args()
    command_line.check_writable("--json", args.json, parser.error)
    with Workers(N_RANKS, timeout_s=600) as workers:
        sheet = loss_sheet(measure_losses(workers))
        conditions = on_rank_0(workers, describe)
    drawn = {"differences": measure_differences()}
    save_and_show(args.json, Report(made_here(), {"losses": sheet}, conditions, drawn=drawn), parser.error)


if __name__ == "__main__":
    main()
