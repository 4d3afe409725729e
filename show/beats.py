"""What the page says: eight to twelve beats a stage, three a bug; and the formulas that its counters are held against.

A beat stands where rank 0 has done a line: `at` is a part of its text, `visit` counts how often rank 0 has come to it.
"""

from typing import NamedTuple


class Beat(NamedTuple):
    says: str
    at: str
    visit: int = 0
    also: tuple = ()  # other lines of that function that do it
    look: str = ""  # the row to look at
    right: tuple = ()  # (at, visit) in the run without the bug, where that isn't the same line


# Bytes that a rank sends in a step, and holds after one, before zero_grad: a mean over the ranks. Ψ = 64 elements of 4
# bytes, d = 4, AdamW.
FORMULAS = {
    "0": ("2·4Ψ·(d-1)/d", 2 * 4 * 64 * 3 // 4, "16Ψ", 16 * 64),
    "1": ("3·4Ψ·(d-1)/d", 3 * 4 * 64 * 3 // 4, "(8 + 8/d)Ψ", 10 * 64),
    "2": ("3·4Ψ·(d-1)/d + padding", (2 * 4 * 64 + 4 * 68) * 3 // 4, "(8 + 8/d)Ψ", 10 * 64),
    "3": ("2·4Ψ·(d-1)/d", 2 * 4 * 64 * 3 // 4, "(8 + 8/d)Ψ", 10 * 64),
    "4": ("2·4Ψ·(d-1)/d + padding", 2 * 4 * 72 * 3 // 4, "(4 + 12/d)Ψ + two buckets + padding",
          4 * 72 + 4 * 18 + 8 * 16 + 2 * 4 * 12),
}

START, BACKWARD = "for batch in batches:", "loss.backward()"
FLAT = ("flat = flatten(",)
LEAVES, LANDS = "return [dist.reduce_scatter_tensor", "torch._foreach_copy_(targets"
BEATS = {
    "0": (
        Beat("Four ranks hold the same 64 parameters, in eight tensors. Each is about to train on a batch of its own.",
             START, look="parameters"),
        Beat("The backward pass leaves 64 gradients on every rank: each rank's own.", BACKWARD, -1, look="gradients"),
        Beat("Each rank copies its gradients into one flat tensor, and divides them by the number of ranks: the sum "
             "over the ranks will be the average.", "flat /= self.world_size", also=FLAT, look="sync_grads: flat"),
        Beat("The all-reduce adds up the gradients of all ranks, and gives every rank all 64 sums. Each rank sends 3/4 "
             "of 256 B twice: 384 B.", "dist.all_reduce(flat", look="sync_grads: flat"),
        Beat("The averages take the place of the gradients.", "torch._foreach_copy_(grads", look="gradients"),
        Beat("The flat tensor is released. Every rank holds the same 64 averages.", "self.sync_grads()", -1),
        Beat("Every rank updates all 64 parameters, and keeps two moments of each: the same work, four times.",
             "self.optimizer.step()", look="exp_avg"),
        Beat("Nothing is sent back, because all ranks have computed the same. 8 of 16 bytes per parameter are moments. "
             "The stages save three of their four copies.", "self.sync_params()", look="exp_avg_sq"),
        Beat("The gradients are released, and the next forward pass reads the new parameters.", "return hidden", -1),
    ),
    "1": (
        Beat("Each of the eight tensors has one owner now: its colour. Only the owner will update it. All ranks hold "
             "all parameters.", START, look="parameters"),
        Beat("The backward pass leaves all 64 gradients on every rank, as before.", BACKWARD, -1, look="gradients"),
        Beat("As in replicated training: copied into one flat tensor, and divided by the number of ranks.",
             "flat /= self.world_size", also=FLAT, look="average: flat"),
        Beat("An all-reduce gives every rank the average of every gradient.", "dist.all_reduce(flat",
             look="average: flat"),
        Beat("A rank will read only the averages of what it owns. The others are garbage (grey) at once: they were "
             "sent for nothing.", "self.average(", -1, look="gradients"),
        Beat("Each rank updates what it owns, and keeps moments of 15 to 17 elements instead of 64.",
             "self.optimizer.step()", look="exp_avg"),
        Beat("Rank 0's turn: it packs its 17 updated elements, and broadcasts them.", "dist.broadcast(flat", also=FLAT,
             look="sync_params: flat"),
        Beat("The other ranks copy these elements to their models. Pale parameters are still old.", LANDS, 1,
             look="parameters"),
        Beat("Rank 1's turn. While it sends, the links of ranks 2 and 3 are idle.", LANDS, 2, look="parameters"),
        Beat("Ranks 2 and 3 have had their turns: every rank has all new parameters.", "self.sync_params()", -1,
             look="parameters"),
        Beat("The gradients are released. Each rank keeps a quarter of the moments, but sends half again as many bytes "
             "as DDP.", "return hidden", -1),
    ),
    "2": (
        Beat("As in stage 1, each tensor has one owner, and only the owner will update it.", START, look="parameters"),
        Beat("The backward pass leaves all 64 gradients on every rank.", BACKWARD, -1, look="gradients"),
        Beat("Copied into one flat tensor, and divided by the number of ranks.", "flat /= self.world_size", also=FLAT,
             look="average: flat"),
        Beat("An all-reduce averages them.", "dist.all_reduce(flat", look="average: flat"),
        Beat("Each rank will read only the averages of what it owns.", "self.average(", -1, look="gradients"),
        Beat("Each rank updates what it owns.", "self.optimizer.step()", look="exp_avg"),
        Beat("The ranks own 15 to 17 elements, but an all-gather takes equal parts. So each rank pads its shard to 17, "
             "and makes room for all four.", "gathered = padded.new_empty", also=("padded = self.shards",),
             look="sync_params: padded"),
        Beat("One all-gather replaces four broadcasts: all ranks send at once.", "dist.all_gather_into_tensor(",
             look="sync_params: gathered"),
        Beat("Each rank cuts off the padding, and copies all parameters to its model.", "self.sync_params()", -1,
             look="parameters"),
        Beat("The gradients are released. Stage 2 sends the bytes of stage 1 and some padding, in fewer turns.",
             "return hidden", -1),
    ),
    "3": (
        Beat("State 1 of 5, ZEROS: one flat buffer holds zeros. Rank r owns line r, even where a parameter crosses "
             "lines. Black ticks stand between parameters.", START, look="GradBuffer.flat"),
        Beat("State 2, GRADS: every gradient is a view of the buffer, so after the backward pass each rank's buffer "
             "holds its own 64 gradients.", "self.holds = Holds.GRADS", -1, look="GradBuffer.flat"),
        Beat("Each rank divides its gradients by the number of ranks, in place.", "self.flat /= self.world_size",
             look="GradBuffer.flat"),
        Beat("State 3, GRAD_SHARD: the reduce-scatter, half of an all-reduce. Rank r receives line r of the other "
             "ranks and adds it up. Its other lines are garbage. Each rank sends 3 lines: 192 B.",
             "dist.reduce_scatter_tensor(", look="GradBuffer.flat"),
        Beat("Each rank updates the 16 elements that it owns, from its averages, which are used up then. AdamW creates "
             "two moments of each: 128 B.", "self.optimizer.step()", look="exp_avg"),
        Beat("State 4, PARAM_SHARD: each rank writes its updated parameters where its averages were. The rest is still "
             "garbage.", "self.holds = Holds.PARAM_SHARD", look="GradBuffer.flat"),
        Beat("State 5, PARAMS: the all-gather, the other half. Each rank sends its line to the 3 others: 192 B more. "
             "Together that is DDP's all-reduce, 384 B.", "dist.all_gather_into_tensor(", look="GradBuffer.flat"),
        Beat("The new parameters are copied to the model. What is left in the buffer is garbage.", LANDS, -1,
             look="parameters"),
        Beat("State 1 again: the buffer is zeroed, because the next backward pass adds to it.", "self.flat.zero_()",
             look="GradBuffer.flat"),
        Beat("A rank has sent as many bytes as with DDP, and holds a quarter of the moments.", "return hidden", -1),
    ),
    # For the picture of chapter 3: what the buffer holds in each state.
    "3-small": (
        Beat("ZEROS: before the backward pass", START),
        Beat("GRADS: each rank's own gradients", "self.holds = Holds.GRADS", -1),
        Beat("GRAD_SHARD, after the reduce-scatter: averages, and garbage", "dist.reduce_scatter_tensor("),
        Beat("PARAM_SHARD, after the inner step: updated parameters, and garbage", "self.holds = Holds.PARAM_SHARD"),
        Beat("PARAMS, after the all-gather: all updated parameters", "dist.all_gather_into_tensor("),
    ),
    "4": (
        Beat("The parameters lie in one buffer, in seven buckets side by side, two or three columns each. Line r of "
             "each belongs to rank r. Blank cells are padding.", START, look="ParameterBuffer.flat"),
        Beat("The backward pass has done the last layer: its gradients are complete. So the first bucket is full, and "
             "can be sent.", "self.bucket_of[param].ready.add(param)", look="gradients"),
        Beat("They are copied into a bucket buffer, and released. The buffer fits the largest bucket, so lines don't "
             "match ranks here: follow the colours.", "param.grad = None", also=("torch._foreach_copy_(slots",),
             look="BucketBuffer.sent"),
        Beat("The first bucket's reduce-scatter starts, and will average. Nobody waits for it: the backward pass goes "
             "on.", LEAVES, look="BucketBuffer.sent"),
        Beat("The second bucket takes the second buffer. Two reduce-scatters are in flight.", LEAVES, 1,
             look="BucketBuffer.sent"),
        Beat("A third bucket is full, but both buffers are in flight. The backward pass waits for the first bucket's "
             "reduce-scatter, which will free its buffer.", "self.receive_oldest()", also=("if not self.idle:",),
             look="BucketBuffer.sent"),
        Beat("The first bucket has arrived: each rank keeps its quarter of the averages, and the third bucket leaves "
             "from the same buffer.", LEAVES, 2, look="PartitionedGradient.shard"),
        Beat("The six other buckets followed, two at a time, and step has waited for the last. Of all averages, each "
             "rank holds those of its own shards alone.", "self.step_own()", look="PartitionedGradient.shard"),
        Beat("Each rank updates its shard of every bucket, in place, in the parameter buffer.", "self.optimizer.step()",
             look="ParameterBuffer.flat"),
        Beat("Seven all-gathers start, in the order in which the next forward pass reads, and step returns.",
             "if not self.prefetching:", also=("bucket.start_param_sync()",), look="ParameterBuffer.flat"),
        Beat("The first layer waits for its own bucket, and for no other. It has arrived; dashed parameters are old "
             "until theirs arrives.", "work.wait()", -7, look="ParameterBuffer.flat"),
        Beat("Layer by layer the other buckets arrive. Both halves of the all-reduce were in flight while the model "
             "computed, and no rank held all averages.", "return hidden", -1, look="ParameterBuffer.flat"),
    ),
    "1-copy": (
        Beat("Here the runs part: rank 0's new parameters have arrived on every rank, but nobody copies them to the "
             "model.", "dist.broadcast(flat", look="parameters", right=(LANDS, 1)),
        Beat("From then on each rank has only its own parameters new, and all others old: four different models.",
             "self.sync_params()", -1, look="parameters"),
        Beat("What a user sees: no error, and a loss that falls almost as before. Only comparing the ranks tells.",
             "return hidden", -1, look="parameters"),
    ),
    "2-order": (
        Beat("Here the runs part: each rank packs what it owns in the model's order, not in the order of its shard.",
             "gathered = padded.new_empty", look="sync_params: padded"),
        Beat("From then on pieces of one tensor lie in another, on all ranks alike, because the shards were cut in "
             "their own order.", "self.sync_params()", -1, look="parameters"),
        Beat("What a user sees: no error, replicas that agree, and a loss that jumps.", "return hidden", -1,
             look="parameters"),
    ),
    "3-none": (
        Beat("Here the runs part: torch's zero_grad sets param.grad to None, and the buffer still holds parameters.",
             "self.zero_grad()", look="GradBuffer.flat", right=("self.flat.zero_()", 0)),
        Beat("From then on gradients miss the buffer: autograd creates new tensors for them.", BACKWARD, -1,
             look="gradients"),
        Beat("What a user sees: no error. Each step takes parameters for gradients, so the loss doesn't fall.",
             "self.optimizer.step()", -1, look="exp_avg"),
    ),
    "3-zero": (
        Beat("Here the runs part: the second step begins, and the buffer still holds parameters.",
             "loss = model(batch)", 1, look="GradBuffer.flat", right=("self.flat.zero_()", 0)),
        Beat("From then on gradients are added to parameters.", "self.holds = Holds.GRADS", -1, look="GradBuffer.flat"),
        Beat("What a user sees: nothing while the loop calls zero_grad itself; without that call, steps that are too "
             "large.", "self.optimizer.step()", -1, look="exp_avg"),
    ),
    "4-queue": (
        Beat("Here the runs part: rank 1 has computed its layers in another order, and sends another bucket than the "
             "other ranks.", LEAVES, look="BucketBuffer.sent"),
        Beat("From then on sums mix different layers. Both buckets have the same length, so nothing complains.",
             "self.step_own()", look="PartitionedGradient.shard"),
        Beat("What a user sees: where layers have equal lengths, wrong steps without an error; elsewhere a hang.",
             "self.optimizer.step()", look="ParameterBuffer.flat"),
    ),
    "4-wait": (
        Beat("Here the runs part: the second layer waits for the first layer's bucket, and computes with old "
             "parameters.", "return Weigh.apply(hidden", -1, look="ParameterBuffer.flat", right=("work.wait()", -6)),
        Beat("From then on every layer but the first reads parameters that are one step old.", "return hidden", -1,
             look="ParameterBuffer.flat"),
        Beat("What a user sees: a loss that is a little worse, in some runs: on a real link it is a race.",
             "return hidden", -1, look="ParameterBuffer.flat"),
    ),
}


def visits(recording, text):
    """-> (frame, function, line) of each time that rank 0 comes to a line with `text`, when it is done."""
    found, before = [], None
    for index, frame in enumerate(recording["frames"]):
        at = dict(frame["at"])
        for function, line in recording["stacks"][at[0]][-1:] if 0 in at else ():
            if text in lines_of(recording, function)[line - 1]:
                found[len(found) - (before == (function, line)) :] = [(index, function, line)]
            before = function, line
    return found


def lines_of(recording, function):
    """-> the lines of the file that a function is in."""
    return recording["files"][recording["functions"][function][1]][1].splitlines()


def resolved(id, recording, right=None):
    """-> {says, frame, function, lines, look} of each beat, as the page reads it; `right`: frame of the right run."""
    made = []
    for beat in BEATS.get(id, ()):
        try:
            frame, function, line = visits(recording, beat.at)[beat.visit]
            _, _, first, last, _ = recording["functions"][function]
            source = lines_of(recording, function)
            also = [next(n for n in range(first, last + 1) if text in source[n - 1]) for text in beat.also]
            made.append({"says": beat.says, "frame": frame, "function": function, "lines": sorted([line, *also]),
                         "look": beat.look})
            if right:
                at, visit = beat.right or (beat.at, beat.visit)
                made[-1]["right"] = visits(right, at)[visit][0]
        except (IndexError, StopIteration) as error:
            raise ValueError(f"no such line in {recording['title']!r}: {beat}") from error
    return made


def edit_of(program, recording, right):
    """-> the edit as a diff: file, its first line in the edited source, lines that have gone, how many have come."""
    name, before, after = program.edit
    file = [title for title, _ in recording["files"]].index(name)
    original = right["files"][file][1]
    first = original[: original.index(before)].count("\n") + 1
    return {"file": file, "line": first, "gone": before.splitlines(), "come": len(after.splitlines())}
