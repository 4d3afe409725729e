"""The sentences of the page, a Beat for each moment that it shows; and formulas for its counters.

A beat is shown when rank 0 has executed the line that contains `code`. Numbers in braces are facts of the recording.
Words in brackets are the caption of the beat in a scene: a beat without brackets is on the page only.
"""

import re
from collections import Counter
from typing import NamedTuple


class Beat(NamedTuple):
    says: str
    code: str
    visit: int = 0  # which execution of the line, from 0 on; -1: the last. An all-reduce has two, one for each half
    also: tuple = ()  # parts of other lines of the same function, which are marked too
    look: str = ""  # the row of memory that the sentence is about
    right: tuple = ()  # (code, visit) in the recording that is shown beside this one, where that is another line


NUMBERS = "none one two three four five six seven eight".split()
START, BACKWARD = "for batch in batches:", "loss.backward()"
FLAT = ("flat = flatten(",)
ALL_REDUCE = "dist.all_reduce(flat"
LEAVES, LANDS = "return [dist.reduce_scatter_tensor", "torch._foreach_copy_(targets"
ARRIVED = "self.last_param_sync, self.param_sync ="
OWNED = (  # stages 1 and 2, until parameters are sent
    Beat("[Each of the {tensors} tensors has one owner: its colour.] Only the owner will update it. All ranks hold "
         "all parameters.", START, look="parameters"),
    Beat("[The backward pass leaves all {numel} gradients on every rank.]", BACKWARD, -1, look="gradients"),
    Beat("As in replicated training, [each rank copies them into one flat tensor, divided by 4. Grey is garbage: "
         "nobody reads it again.]", "flat /= self.world_size", also=FLAT, look="average: flat"),
    Beat("[First half of the all-reduce, a reduce-scatter: each rank averages a quarter.] A rank sends 3/4 of {whole} "
         "B: {half} B.", ALL_REDUCE, look="average: flat"),
    Beat("[Second half, an all-gather: each rank sends its quarter to all other ranks.] Now a rank has sent {both} B, "
         "and holds all {numel} averages.", ALL_REDUCE, 1, look="average: flat"),
    Beat("[Each rank copies the averages back. It will read those of its own tensors]; the others were sent for "
         "nothing, and are garbage at once.", "self.average(", -1, look="gradients"),
    Beat("[Each rank updates what it owns], and keeps moments of {least} to {most} elements instead of {numel}.",
         "self.optimizer.step()", look="exp_avg"),
)
BEATS = {
    # Stage 3, with replicated training beside it.
    "idea": (
        Beat("Each rank has gradients of its own, {numel} of them (striped), and has divided them by d. Neither stage "
             "3 nor DDP has sent anything yet.", "self.flat /= self.world_size", look="GradBuffer.flat",
             right=("flat /= self.world_size", 0)),
        Beat("Both begin with a reduce-scatter: rank r receives line r of all other ranks, and adds it up. The rest is "
             "garbage (grey): nobody reads it. A rank has sent {half} B.", "dist.reduce_scatter_tensor(",
             look="GradBuffer.flat", right=(ALL_REDUCE, 0)),
        Beat("DDP goes on with the other half of its all-reduce: an all-gather of the averages. In stage 3 each rank "
             "updates first: the {shard} elements whose averages it has.", "self.optimizer.step()", look="exp_avg",
             right=(ALL_REDUCE, 1)),
        Beat("Stage 3's all-gather carries new parameters, where DDP's carried averages. With DDP every rank updates "
             "all {numel} elements, and keeps all their moments.", "dist.all_gather_into_tensor(",
             look="GradBuffer.flat", right=("self.optimizer.step()", 0)),
        Beat("The same parameters, and the same {both} B sent. But of 16 bytes per parameter DDP holds 8 in moments, "
             "on every rank; stage 3 holds 8/d.", "return hidden", -1, look="parameters"),
    ),
    "0": (
        Beat("Four ranks hold the same {numel} parameters, in {tensors} tensors. Each is about to train on a batch of "
             "its own.", START, look="parameters"),
        Beat("The backward pass leaves {numel} gradients on every rank: each rank's own.", BACKWARD, -1,
             look="gradients"),
        Beat("Each rank copies its gradients into one flat tensor, and divides them by the number of ranks: the sum "
             "over the ranks will be the average.", "flat /= self.world_size", also=FLAT, look="sync_grads: flat"),
        Beat("First half of the all-reduce, a reduce-scatter: rank r receives line r of all other ranks, and adds it "
             "up. Its other lines are garbage. A rank sends 3/4 of {whole} B: {half} B.", ALL_REDUCE,
             look="sync_grads: flat"),
        Beat("Second half, an all-gather: each rank sends its line of averages to all other ranks. A rank has sent "
             "3/4 of {whole} B twice: {both} B.", ALL_REDUCE, 1, look="sync_grads: flat"),
        Beat("The averages take the place of the gradients.", "torch._foreach_copy_(grads", look="gradients"),
        Beat("The flat tensor is released. Every rank holds the same {numel} averages.", "self.sync_grads()", -1),
        Beat("Every rank updates all {numel} parameters, and keeps two moments of each: the same work, four times.",
             "self.optimizer.step()", look="exp_avg"),
        Beat("Nothing is sent back, because all ranks have computed the same. 8 of 16 bytes per parameter are moments. "
             "The stages save three of their four copies.", "self.sync_params()", look="exp_avg_sq"),
        Beat("The gradients are released, and the next forward pass reads the new parameters.", "return hidden", -1),
    ),
    "1": (
        *OWNED,
        Beat("[Rank 0's turn: it packs its {own} updated elements, and broadcasts them.]", "dist.broadcast(flat",
             also=FLAT, look="sync_params: flat"),
        Beat("The other ranks copy these elements to their models. Pale parameters are still old.", LANDS, 1,
             look="parameters"),
        Beat("[Rank 1's turn: while it sends, the other ranks only receive.]", LANDS, 2, look="parameters"),
        Beat("Ranks 2 and 3 have had their turns: every rank has all new parameters.", LANDS, -1, look="parameters"),
        Beat("The gradients are released. Each rank keeps [a quarter of the moments, and has sent {sent} B: 1.5 times "
             "DDP's {both}.]", "return hidden", -1),
    ),
    "2": (
        *OWNED,
        Beat("The ranks own {least} to {most} elements, but an all-gather takes equal parts. So [each rank pads its "
             "shard to {most}], and makes room for all four.", "gathered = padded.new_empty",
             also=("padded = self.shards",), look="sync_params: padded"),
        Beat("[One all-gather replaces four broadcasts. It sends the padding, too.] A rank sends 3 times {most} "
             "elements.", "dist.all_gather_into_tensor(",
             look="sync_params: gathered"),
        Beat("[Each rank cuts off the padding, and copies everything to its model.]", "self.sync_params()", -1,
             look="parameters"),
        Beat("The gradients are released. Stage 2 sends the bytes of stage 1 and the padding, {sent} B, in fewer "
             "turns.", "return hidden", -1),
    ),
    "3": (
        Beat("State 1 of 5, ZEROS: [each rank's buffer holds zeros. Rank r owns line r], even where a parameter "
             "crosses lines. Black ticks stand between parameters.", START, look="GradBuffer.flat"),
        Beat("State 2, GRADS: every gradient is a view of the buffer, so after the backward pass [each rank's buffer "
             "holds its own {numel} gradients.]", "self.holds = Holds.GRADS", -1, look="GradBuffer.flat"),
        Beat("[Each rank divides its gradients by the number of ranks, in place.]", "self.flat /= self.world_size",
             look="GradBuffer.flat"),
        Beat("State 3, GRAD_SHARD: half of an all-reduce. [Reduce-scatter: rank r receives all others' line r and adds "
             "it up. The rest is garbage: nobody reads it.] A rank sends 3 lines: {half} B.",
             "dist.reduce_scatter_tensor(", look="GradBuffer.flat"),
        Beat("[Each rank updates the {shard} elements that it owns], from its averages, which are used up then. AdamW "
             "creates two moments of each: {moments} B.", "self.optimizer.step()", look="exp_avg"),
        Beat("State 4, PARAM_SHARD: [each rank writes its updated parameters where its averages were.] The rest is "
             "still garbage.", "self.holds = Holds.PARAM_SHARD", look="GradBuffer.flat"),
        Beat("State 5, PARAMS. [All-gather, the other half: each rank sends its line to all others.] That is {half} B "
             "more, and together DDP's all-reduce: {both} B.", "dist.all_gather_into_tensor(", look="GradBuffer.flat"),
        Beat("[The new parameters are copied to the model.] What is left in the buffer is garbage.", LANDS, -1,
             look="parameters"),
        Beat("State 1 again: the buffer is zeroed, because the next backward pass adds to it.", "self.flat.zero_()",
             look="GradBuffer.flat"),
        Beat("A rank has sent as many bytes as with DDP, and holds a quarter of the moments.", "return hidden", -1),
    ),
    "4": (
        Beat("[The parameters lie in one buffer, in {buckets} buckets side by side. Line r of each belongs to rank r.]",
             START, look="ParameterBuffer.flat"),
        Beat("[The backward pass has done the last layer: its gradients are complete, so bucket 1 is full], and can "
             "be sent.", "self.bucket_of[param].ready.add(param)", look="gradients"),
        Beat("[They are copied into a bucket buffer, and released.] The four shards of the bucket lie there one after "
             "another: follow the colours.", "param.grad = None", also=("torch._foreach_copy_(slots",),
             look="BucketBuffer.sent"),
        Beat("[Bucket 1's reduce-scatter starts, and nobody waits for it]: the backward pass goes on.", LEAVES,
             look="BucketBuffer.sent"),
        Beat("[Bucket 2 takes the second buffer: two reduce-scatters are in flight.]", LEAVES, 1,
             look="BucketBuffer.sent"),
        Beat("[Bucket 3 must wait: buckets 1 and 2 are still in flight.] So the backward pass waits, until bucket 1 "
             "has arrived and its buffer is free.", "self.receive_oldest()", also=("if not self.idle:",),
             look="BucketBuffer.sent"),
        Beat("[Bucket 1 arrives: each rank keeps its quarter of the averages], and bucket 3 leaves from the same "
             "buffer.", LEAVES, 2, look="PartitionedGradient.shard"),
        Beat("[The {others} other buckets follow, two at a time], and step waits for the last. Each rank holds the "
             "averages of its own shards alone.", "self.step_own()", look="PartitionedGradient.shard"),
        Beat("[Each rank updates its shard of every bucket], in place, in the parameter buffer.",
             "self.optimizer.step()", look="ParameterBuffer.flat"),
        Beat("The {buckets} all-gathers start, in the order in which the next forward pass reads, and step returns.",
             "if not self.prefetching:", also=("bucket.start_param_sync()",), look="ParameterBuffer.flat"),
        Beat("[The first layer waits for its own bucket, and for no other.] Dashed parameters are old until theirs "
             "arrives.", ARRIVED, also=("work.wait()",), look="ParameterBuffer.flat"),
        Beat("[Layer by layer the other buckets arrive.] A rank has sent {sent} B, as with DDP: both halves of the "
             "all-reduce, while the model computed. No rank held all averages.", "return hidden", -1,
             look="ParameterBuffer.flat"),
    ),
    "1-copy": (
        Beat("Here the runs part: rank 0's new parameters have arrived on every rank, but nobody copies them to the "
             "model.", "dist.broadcast(flat", look="parameters", right=(LANDS, 1)),
        Beat("From then on each rank has only its own parameters new, and all others old: four different models.",
             "dist.broadcast(flat", -1, look="parameters", right=(LANDS, -1)),
        Beat("What a user sees: no error, and a loss that falls almost as before. Only comparing the ranks tells.",
             "return hidden", -1, look="parameters"),
    ),
    "2-order": (
        Beat("Here the runs part: each rank packs what it owns in the model's order, not in the order of its shard.",
             "gathered = padded.new_empty", look="sync_params: padded"),
        Beat("From then on pieces of one tensor lie in another, on all ranks alike, because the shards were cut in "
             "their own order.", "self.sync_params()", -1, look="parameters"),
        Beat("What a user sees: no error, replicas that agree, and a loss that hardly falls, or jumps.",
             "return hidden", -1, look="parameters"),
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
             "parameters.", "return Weigh.apply(hidden", -1, look="ParameterBuffer.flat", right=(ARRIVED, 1)),
        Beat("From then on every layer but the first reads parameters that are one step old.", "return hidden", -1,
             look="ParameterBuffer.flat"),
        Beat("What a user sees: a loss that is a little worse, in some runs: on a real link it is a race.",
             "return hidden", -1, look="ParameterBuffer.flat"),
    ),
}


def facts(recording):
    """Return what the sentences say in numbers: elements, bytes of fp32, and what the ranks own."""
    numel = sum(recording["params"])
    d = recording["ranks"]
    params = recording["params"]
    owned = sorted(Counter(recording["owners"]).values())
    n_buckets = sum(operation["kind"] == "reduce-scatter" for operation in recording["operations"])
    half = 4 * numel * (d - 1) // d
    return {"numel": numel, "tensors": NUMBERS[len(params)], "whole": 4 * numel, "half": half, "both": 2 * half,
            "shard": NUMBERS[numel // d] if numel // d <= 8 else numel // d, "moments": 8 * numel // d,
            "sent": int(recording["sent_bytes"]),
            "least": owned[0], "most": owned[-1], "own": recording["owners"].count(0),
            "buckets": NUMBERS[n_buckets], "others": NUMBERS[max(0, n_buckets - 1)]}


def formulas(id, recording):
    """Return what a rank sends in a step, and holds after one, before zero_grad: as text and in bytes, with AdamW."""
    numel, d = sum(recording["params"]), recording["ranks"]
    rows = {storage["row"]: storage["numel"] for storage in recording["storages"]}
    twice = "2·4Ψ·(d-1)/d"
    thrice = "3·4Ψ·(d-1)/d"
    sharded = ("(8 + 8/d)Ψ", (8 + 8 / d) * numel)
    sent, held = {
        "0": ((twice, 8 * numel), ("16Ψ", 16 * numel)),
        "1": ((thrice, 12 * numel), sharded),
        "2": ((f"{thrice} + padding", 8 * numel + 4 * rows.get("sync_params: gathered", 0)), sharded),
        "3": ((twice, 8 * numel), sharded),
        "4": ((twice, 8 * numel),
              ("(4 + 12/d)Ψ + two buckets", (4 + 12 / d) * numel + 2 * 4 * rows.get("BucketBuffer.sent", 0))),
    }[re.sub("idea.*", "3", id)]
    return {"sent": sent[0], "sent_bytes": sent[1] * (d - 1) // d, "held": held[0], "held_bytes": int(held[1]),
            "ddp_sent": 8 * numel * (d - 1) // d, "ddp_held": 16 * numel}


def visits(recording, code):
    """Return (frame, function, line) of each time that rank 0 has executed a line with `code`."""
    first_halves = {max(arrow[4] for arrow in operation["arrows"]) for operation in recording["operations"]
                    if operation["kind"] == "reduce-scatter" and operation["whole"] == "all-reduce"}
    places = []
    before = None
    for index, frame in enumerate(recording["frames"]):
        stack = dict(frame["at"]).get(0)
        if stack is None:  # rank 0 waits
            continue
        here = function, line = tuple(recording["stacks"][stack][-1])
        if code in lines_of(recording, function)[line - 1]:
            if here == before and places[-1][0] not in first_halves:
                places.pop()
            places.append((index, function, line))
        before = here
    return places


def lines_of(recording, function):
    """-> the lines of the file that a function is in."""
    return recording["files"][recording["functions"][function][1]][1].splitlines()


def resolved(id, recording, right=None):
    """Return {says, caption, frame, function, lines, look} of each beat, as the page reads it.

    `right` is the recording that is shown beside it, and in a beat the frame of that.
    """
    return [resolved_beat(beat, recording, right) for beat in BEATS.get(re.sub("idea.*", "idea", id), ())]


def resolved_beat(beat, recording, right):
    says = beat.says.format(**facts(recording))
    caption = " ".join(re.findall(r"\[(.*?)\]", says)).rstrip(".")
    try:
        frame, function, line = visits(recording, beat.code)[beat.visit]
        _, _, first, last, _ = recording["functions"][function]
        source = lines_of(recording, function)
        also = [next(n for n in range(first, last + 1) if text in source[n - 1]) for text in beat.also]
        code, visit = beat.right or (beat.code, beat.visit)
        compared = {"right": visits(right, code)[visit][0]} if right else {}
    except (IndexError, StopIteration) as error:
        raise ValueError(f"no such line in {recording['title']!r}: {beat}") from error
    return {"says": re.sub(r"[\[\]]", "", says), "caption": caption[:1].upper() + caption[1:], "frame": frame,
            "function": function, "lines": sorted([line, *also]), "look": beat.look} | compared


def edit_of(program, recording, right):
    """Return the edit as a diff: file, its first line in the edited source, the lines removed, how many are added."""
    name, before, after = program.edit
    file = [title for title, _ in recording["files"]].index(name)
    original = right["files"][file][1]
    first = original[: original.index(before)].count("\n") + 1
    return {"file": file, "line": first, "gone": before.splitlines(), "come": len(after.splitlines())}
