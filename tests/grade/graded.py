"""Optimizers for `make grade`: right ones, and what learners get wrong: other lines in one of them, or in a stage.

Each right one passes level 1. A mistake has the check that fails, and what its lines begin with.
"""

import contextlib
import inspect
import os
import threading  # noqa: F401, the lines of a mistake use it
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from grade import by_hand, grader, levels, mistakes
from harness import STAGES
from stage1_naive_broadcast.optimizer import ShardedOptimizer as Stage1
from stage1_naive_broadcast.optimizer import hyperparameters

FILE = f"{os.path.relpath(__file__)}:"


class Right:
    """A sharded optimizer in 25 lines: level 1's interface, and no more. Parameters have an owner each."""
    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs):
        self.params, self.group = list(params), process_group
        self.rank, self.d = dist.get_rank(process_group), dist.get_world_size(process_group)
        for param in self.params:
            dist.broadcast(param.data, group=self.group, group_src=0)
        numels, self.owner = [0] * self.d, {}  # the largest parameter first, to the rank that has least
        for param in sorted(self.params, key=torch.Tensor.numel, reverse=True):
            self.owner[param] = numels.index(min(numels))
            numels[self.owner[param]] += param.numel()
        self.optimizer = optimizer_cls([{"params": self.owned()}], **optimizer_kwargs)  # which may be none

    def owned(self):
        return [param for param in self.params if self.owner[param] == self.rank]

    @torch.no_grad()
    def step(self):
        for param in self.params:
            self.average(param.grad)
        self.optimizer.step()
        for param in self.params:
            self.send(param, self.owner[param])

    def average(self, grad):
        dist.all_reduce(grad, group=self.group)
        grad /= self.d

    def send(self, param, owner):
        dist.broadcast(param, group=self.group, group_src=owner)

    def zero_grad(self):
        for param in self.params:
            param.grad = None


class Flat(Right):
    """One flat tensor, padded to a multiple of 64 elements a rank; shards ignore parameters, and travel in lists."""
    def owned(self):
        numel, start = sum(param.numel() for param in self.params), 0
        self.flat = torch.zeros(-(-numel // (64 * self.d)) * 64 * self.d)
        for param in self.params:
            view = self.flat[start : start + param.numel()].view(param.shape)
            param.data = view.copy_(param.data)
            start += param.numel()
        self.shards = list(self.flat.view(self.d, -1))
        self.shard = torch.nn.Parameter(self.shards[self.rank])
        return [self.shard]

    @torch.no_grad()
    def step(self):
        grads = torch.cat([param.grad.reshape(-1) for param in self.params])
        padded = torch.nn.functional.pad(grads / self.d, (0, self.flat.numel() - grads.numel()))
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(padded.view(self.d, -1)), group=self.group)
        self.optimizer.step()
        dist.all_gather(self.shards, self.shard.data.clone(), group=self.group)


class Copies(Right):
    """The inner optimizer steps copies of what a rank owns."""
    def owned(self):
        self.copies = {param: torch.nn.Parameter(param.detach().clone()) for param in super().owned()}
        return list(self.copies.values())

    @torch.no_grad()
    def step(self):
        for param in self.params:
            self.average(param.grad)
        for param, copy in self.copies.items():
            copy.grad = param.grad
        self.optimizer.step()
        for param in self.params:
            received = self.copies.get(param, torch.empty_like(param))
            self.send(received, self.owner[param])
            param.copy_(received)


class RoundRobin(Right):
    """Sharded, but unevenly: of layers with a weight and a bias, rank 0 of 2 gets all the weights."""
    def owned(self):
        self.owner = {param: index % self.d for index, param in enumerate(self.params)}
        return super().owned()


class Slow(Right):
    """One rank computes for a while, and the other waits for it: no hang."""
    def step(self):
        until = time.monotonic() + 12 * (self.rank == 0)
        while time.monotonic() < until:
            pass
        super().step()


class Whole(Stage1):
    """Stage 1's core, and what level 2 asks for besides."""
    is_synced = False

    def params(self):
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def sync_grads(self):
        if self.is_synced:
            return
        users = torch.tensor([float(param.grad is not None) for param in self.params()])  # ranks
        dist.all_reduce(users, group=self.process_group)
        for param, n_users in zip(self.params(), users.tolist()):
            if n_users and param.grad is None:
                param.grad = torch.zeros_like(param)
        super().sync_grads()
        self.is_synced = True

    @torch.no_grad()
    def step(self):
        super().step()
        self.is_synced = False

    @contextlib.contextmanager
    def no_sync(self):
        yield  # gradients travel in step(), and nowhere else

    def clip_grad_norm_(self, max_norm):
        self.sync_grads()
        return torch.nn.utils.clip_grad_norm_(self.params(), max_norm)

    def state_dict(self):
        return self.optimizer.state_dict(), [hyperparameters(group) for group in self.param_groups]

    def load_state_dict(self, saved):
        self.optimizer.load_state_dict(saved[0])
        for group, its in zip(self.param_groups, saved[1]):
            group.update(its)


DESIGN = """
import torch
import torch.distributed as dist

from stage1_naive_broadcast.optimizer import ShardedOptimizer as Stage1
from stage1_naive_broadcast.optimizer import hyperparameters


class ShardedOptimizer(Stage1):
"""
DESIGNS = {  # of docs/exercise.md, by its name there: what the page doesn't show
    "Split by elements": """
    def shard(self, groups):
        self.mine = {}
        for param in (param for group in groups for param in group["params"]):
            dist.broadcast(param.detach(), group=self.process_group, group_src=0)
            self.mine[param] = self.pieces(param.detach())[self.rank].clone()
        return [{**hyperparameters(group), "params": [self.mine[param] for param in group["params"]]}
                for group in groups]

    def step_own(self):
        for param, mine in self.mine.items():
            mine.grad = None if param.grad is None else self.pieces(param.grad)[self.rank]
        super().step_own()
""",
    "Round robin": """
    @torch.no_grad()
    def shard(self, groups):
        own_groups = []
        for group in groups:
            for number, param in enumerate(group["params"]):
                dist.broadcast(param, group=self.process_group, group_src=0)
                self.shards[number % self.world_size].append(param)
            owned = group["params"][self.rank :: self.world_size]
            own_groups.append({**hyperparameters(group), "params": owned})
        return own_groups
""",
    "Reduce to the owner": """
    def step(self):
        super().step()
        self.zero_grad()
"""}
RIGHT = Right, Flat, Copies, RoundRobin  # of level 1's interface

SGD, ADAMW = "SGD: ranks equal each other and one process, 2 ranks", "AdamW"
BY_HAND, BY_3 = "16 elements by hand, 2 ranks", "16 elements by hand, 3 ranks"
START, LATE = "all ranks start from rank 0's parameters", "prefetch_params: rank 1 is late"
STATE, BYTES = "the state is spread over 2 ranks", "collectives and bytes"
GROUPS, CLIP = "three groups, with their own lr and weight decay", "clip_grad_norm_ equals torch's on the whole model"
UNUSED = "a parameter that one rank uses, one that none uses"
NO_SYNC, SIXTEEN = "the same, inside no_sync()", "parameters of 16 bits"
PLACES = "a process group of ranks 1 and 2"
RESUME, FIRST = "state_dict() and load_state_dict() go on where they left off", "prefetch_params: the first layer waits"
MOVES = "every element moves by lr × mean gradient, "
ONE_PROCESS, NO_EXCEPTION = "2 ranks train like one process that has the batches of all", "no exception"
ENDS, LIVES = "every rank ends this check", "every rank lives until the end of th"
EXPECTED = {  # check -> its first line, where a mistake says nothing else
    BY_HAND: f"{MOVES}0.1 · (1 + 7) / 2 = 0.4, on every rank",
    BY_3: f"{MOVES}0.1 · (1 + 7 + 49) / 3 = 1.9, on every rank",
    SIXTEEN: f"{MOVES}9.53674e-07 · (131072 + 917504) / 2 = 0.5, on every rank",
    STATE: "AdamW's state exists once, about 1/2 on each rank",
    START: "the constructor gives every rank the",
    BYTES: "at most 3 · 4Ψ · (d-1)/d bytes sent by a rank",
    CLIP: "clip_grad_norm_ returns the norm of all averaged gradients, before it clips: ",
    FIRST: "the first layer computes while the parameters of others are under way"}
STAGE_1, STAGE_2, STAGE_3, STAGE_4, *_ = (f"{stage}/optimizer.py" for stage in STAGES)


class Wrong(NamedTuple):
    """A mistake, and what its lines begin with. An "r" is the number of whichever rank is the first."""
    base: type | str  # or the file of a stage; "" of one in SOURCES
    lines: dict  # before: after
    check: str
    came: str
    cause: str = ""
    also: str = ""  # the second line of what came
    expected: str | None = None

    def said(self):
        first = EXPECTED.get(self.check, ONE_PROCESS) if self.expected is None else self.expected
        lines = {"expected": first, "came": self.came, "cause": self.cause}
        return [*(f"{what:9} {line}" for what, line in lines.items() if line), self.also]


def changed(text, lines, what=""):
    for before, after in lines.items():
        assert text.count(before) == 1, f"{what} has not, or more than once:\n{before}"
        text = text.replace(before, after)
    return text


def mistaken(name):
    """-> the class of a mistake that is made here: its lines keep their numbers up to the first that is another."""
    base, lines, *_ = WRONG[name]
    source, first = inspect.getsourcelines(base)
    made = dict(globals())
    exec(compile("\n" * (first - 1) + changed("".join(source), lines, name), __file__, "exec"), made)
    return made[base.__name__]


SENDS = "dist.broadcast(param, group=self.group, group_src=owner)"
OWNED = '[{"params": self.owned()}], **optimizer_kwargs)'
MINE = "if self.owner[param] == self.rank]"
AVERAGED = "dist.all_reduce(grad, group=self.group)\n        grad /= self.d"
CLIPPED = "return torch.nn.utils.clip_grad_norm_(self.params(), max_norm)"
UPDATED = "own.update(hyperparameters(group))"
LOADED = "        for group, its in zip(self.param_groups, saved[1]):\n            group.update(its)\n"
WRONG = {  # without those of docs/exercise.md, which are graded too
    "Summed": Wrong(Right, {"grad /= self.d": "pass"}, BY_HAND,
        "0.8 wherever it has moved: 2 times the mean", by_hand.SUMMED),
    "AveragedTwice": Wrong(Right, {"grad /= self.d": "grad /= self.d**2"}, BY_HAND,
        "0.2 wherever it has moved: 0.5 times the mean", by_hand.TWICE_AVERAGED),
    "AveragesACopy": Wrong(Right, {"average(param.grad)": "average(torch.cat([param.grad]))"}, BY_HAND,
        "moved by rank 0: 0.1, 0.7; rank 1: 0.1, 0.7", by_hand.NOT_AVERAGED),
    "Noop": Wrong(Right, {"return [param for": "return [param.clone().detach().requires_grad_() for"}, BY_HAND,
        "nothing has moved, on any rank", by_hand.NOTHING["no gradients"]),
    "NotTheOwner": Wrong(Right, {"group_src=owner": "group_src=(owner + 1) % self.d"}, BY_HAND,
        "nothing has moved; after the inner step rank 0 elements 0-3, 8-11, rank 1 elements 4-7, 12-15 had",
        by_hand.OVERWRITTEN),
    "Nobodys": Wrong(Right, {MINE: f"{MINE[:-1]} and param is not self.params[-1]]"}, BY_HAND,
        "elements 12-15 have moved on no rank", "nobody owns these parameters"),
    "ForgetsLr": Wrong(Right, {OWNED: '[{"params": self.owned()}])'}, BY_HAND,
        "0.004 wherever it has moved: 0.01 times the mean gradient", by_hand.DEFAULTS),
    "FiveTimes": Wrong(Right, {"grad /= self.d": "grad *= 5 / self.d"}, BY_HAND,
        "2 wherever it has moved: 5 times the mean", grader.UNKNOWN),
    "Adds": Wrong(Right, {"grad /= self.d": "grad /= -self.d"}, BY_HAND, "-0.4 wherever it has moved: -1 times",
        "step against the gradient"),
    # Some training loops multiply lr by the number of ranks, for larger batches.
    "ScalesLr": Wrong(Right, {OWNED: OWNED.replace("**optimizer_kwargs", '**{**optimizer_kwargs, "lr": self.d * 0.1}')},
        BY_HAND, "0.8 wherever it has moved: 2 times the mean",
        "the inner optimizer has the right gradients, and another lr than the constructor's"),
    "GradientForParameter": Wrong(Right, {"self.send(param, self.owner[param])":
        "self.send(param.grad, self.owner[param])\n            param.copy_(param.grad)"}, BY_HAND,
        "in elements 0-3, 5-15: the mean gradient", "a gradient was taken for a parameter"),
    "Half": Wrong(Right, {"/= self.d": "/= 2"}, BY_3, "2.85 wherever it has moved: 1.5 times the mean gradient",
        "the sum of the gradients is divided by 2: the number of ranks is 3 here"),
    "Padding": Wrong(STAGE_2, {"numels, gathered)": "numels, gathered.view(-1)[: sum(numels)].split(numels))"}, BY_3,
        "in element 11: what element 15 should hold; in element 12: what element 11 should hold; in element 13: 0",
        "padding was taken for parameters"),
    # Rank 0 alone waits for all, before it writes a log, say.
    "Hangs": Wrong(Right, {SENDS: f"if self.rank == 0: dist.barrier(group=self.group)\n        {SENDS}"}, BY_HAND,
        f"rank 0 hangs in barrier ({FILE}",
        "the ranks part at collective 9: barrier on rank 0, broadcast of 16 bytes from rank 0 on rank",
        f"rank 1 hangs in broadcast of 16 bytes from rank 0 ({FILE}", ENDS),
    "WaitsAlone": Wrong(Right, {"self.send(param, self.owner[param])":
        "self.send(param, self.owner[param])\n        self.rank or time.sleep(1000)"}, BY_HAND,
        f"rank 0 hangs in {FILE}", "all ranks have called the same collectives",
        f"rank 1 has ended; its last was broadcast of 16 bytes from rank 1 ({FILE}", ENDS),
    # Each rank waits for what others own, and nobody sends its own.
    "OtherRoots": Wrong(Right, {SENDS: f"if owner != self.rank: {SENDS}"}, BY_HAND,
        "rank 0 hangs in broadcast of 16 bytes from rank 1 (",
        "the ranks part at collective 9: broadcast of 16 bytes from rank 1 on rank 0, from rank",
        "rank 1 hangs in broadcast of 16 bytes from rank 0 (", ENDS),
    "Raises": Wrong(Right, {SENDS: f'if self.rank == 1: raise ValueError("the wrong size")\n        {SENDS}'}, BY_HAND,
        "rank 1: ValueError: the wrong size", "", f"in {FILE}", NO_EXCEPTION),
    "WithGrad": Wrong(Right, {"    @torch.no_grad()\n    def step(self):":
        "    def step(self):\n        self.params[0] -= 1"}, BY_HAND,
        "rank r: RuntimeError: a leaf Variable that requires grad is being",
        "step() and the constructor must run under torch.no_grad()", f"in {FILE}", NO_EXCEPTION),
    "Exits": Wrong(Right, {"def step(self):": "def step(self):\n        raise SystemExit(0)"}, BY_HAND,
        "rank r: SystemExit: 0",
        "the program that trains decides when a rank ends", f"in {FILE}", NO_EXCEPTION),
    "Leaves": Wrong(Right, {"dist.all_reduce": "self.rank == 1 and os._exit(0)\n        dist.all_reduce"}, BY_HAND,
        "rank 1 ended with exit code 0", "os._exit() or a crash ended it",
        f"after broadcast of 16 bytes from rank 0 ({FILE}", LIVES),
    "NoStep": Wrong(Right, {"def step(": "def update("}, "the interface", "DistributedOptimizer has no step()",
        "docs/exercise.md lists the methods that each level asks for", "", "methods step() and zero_grad()"),
    "OtherArguments": Wrong(Right,
        {"self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs": "self, optimizer"},
        BY_HAND, "rank r: TypeError: ", "the constructor hands on what it doesn't know", "", NO_EXCEPTION),
    "NoBroadcast": Wrong(Right, {"dist.broadcast(param.data, group=self.group, group_src=0)": "pass"}, START,
        "elements 0-15 of rank 1 are 1", "parameters are broadcast from the first rank"),
    "CopiesTooEarly": Wrong(Copies, {"    def owned(self):\n": "    def __init__(self, params, *args, **kwargs):\n"
        "        self.first = {param: param.detach().clone() for param in params}\n"
        "        super().__init__(self.first, *args, **kwargs)\n\n    def owned(self):\n",
        "param.detach().clone())": "self.first[param])"}, START,
        "the constructor does; but a step with gradients of 0 makes elements 4-7, 12-15 of rank 0 1",
        "the inner optimizer's copies were made before the broadcast"),
    "In16Bits": Wrong(Right, {"self.average(param.grad)": "self.average(short := param.grad.bfloat16())\n"
        "            param.grad.copy_(short)"}, SGD, "after step 1, ", by_hand.ALMOST),
    "KeepsGrads": Wrong(Right, {"param.grad = None": "pass"}, SGD,
        "after step 2, 0.weight, 0.bias, 2.weight and 3 more",
        "gradients of the step before are added again: zero_grad() must forget them"),
    "NewState": Wrong(Right, {"self.optimizer.step()": "self.optimizer.state.clear()\n        self.optimizer.step()"},
        ADAMW, "after step 2, ", "the optimizer's state is new in each step"),
    "AsTheyCome": Wrong(STAGE_4, {"self.send_full_buckets()\n\n": "if self.bucket_of[param].is_full():\n"
        "            self.send_grads(self.bucket_of[param])\n\n"}, "gradients in another order on rank 1",
        "moved by rank 0: ", by_hand.ORDER, "",
        f"{MOVES}0.4, 0.8, 1.6, 3.2 of the parameters"),
    "NothingOwned": Wrong(Right, {OWNED: OWNED.replace('[{"params": self.owned()}]', "self.owned()")},
        "one parameter, 3 ranks", "rank r: ValueError: optimizer got an empty parameter list",
        "a rank owns nothing here", "in tests/grade/graded.py", NO_EXCEPTION),
    "NoWait": Wrong(STAGE_4, {"for param in module._parameters.values():": "for param in ():"}, LATE, "after step 3, ",
        levels.LATE, "", ""),
    "Unsharded": Wrong(Right, {f" {MINE}": "]"}, STATE, "66560 of its 66560 elements more than once: 100%",
        "every rank steps every parameter"),
    # What has one dimension is small, and stepped on every rank.
    "OwnsTwice": Wrong(Right, {MINE: f"{MINE[:-1]} or param.shape == (64,)]"}, STATE,
        "1024 of its 66560 elements more than once: 51%", "some parameters are stepped on several ranks"),
    "AllReducesParams": Wrong(Right,
        {SENDS: "self.rank == owner or param.zero_()\n        dist.all_reduce(param, group=self.group)"}, BYTES,
        "with 4 ranks, 4.00 · 4Ψ · (d-1)/d bytes, in 32 all_reduce",
        "an all-reduce takes twice the bytes of a broadcast"),
    "OneGroup": Wrong(STAGE_1, {"{**hyperparameters(group), ": "{**self.defaults, ", UPDATED: "pass"}, GROUPS,
        "after step 1, ",
        mistakes.NO_GROUPS),
    "FirstLr": Wrong(STAGE_1, {UPDATED: 'own["lr"] = self.param_groups[0]["lr"]'}, GROUPS,
        "after step 1, ", "the first group's lr is taken for all"),
    "LostDecay": Wrong(STAGE_1, {UPDATED: 'own.update(lr=group["lr"], weight_decay=self.defaults["weight_decay"])'},
        GROUPS, "after step 1, ",
        "the weight decay of a group is lost"),
    # A group is left out where a rank owns nothing of it: the groups after it get another's lr.
    "PairsWrongly": Wrong(STAGE_1, {
        "return own_groups": "return [group for group in own_groups if group['params']] or own_groups",
        UPDATED: 'own["lr"] = group["lr"]'}, GROUPS, "after step 1, ", levels.GROUPS, "", ""),
    "OnlyLr": Wrong(STAGE_1, {UPDATED: 'own["lr"] = group["lr"]'}, "a scheduler that writes betas, too",
        "after step 2, ", "the scheduler's lr arrives, its betas don't"),
    "SendsAgain": Wrong("stage4_overlap/buffer.py", {"            param.grad = None\n": "            pass\n"},
        "three micro-batches equal one large batch", "after step 1, ",
        "micro-batches that were averaged are sent again"),
    "DropsMicroBatches": Wrong(Whole, {"yield": "yield\n        self.zero_grad()"}, NO_SYNC, "after step 1, ",
        "only the last micro-batch counts"),
    "NeverSyncsAgain": Wrong(Whole, {"yield": "self.is_synced = True\n        yield"}, NO_SYNC, "after step 1, ",
        by_hand.NOT_AVERAGED),
    "SyncsInNoSync": Wrong(Whole, {"yield": "yield\n        Stage1.sync_grads(self)"}, NO_SYNC,
        "6 collectives in 3 steps", "gradients must stay on their rank", "", "no communication inside no_sync()"),
    "NotZeroed": Wrong(STAGE_3, {"        self.sync_params()\n        self.zero_grad()": "        self.sync_params()"},
        "a loop without zero_grad()", "step 2 moved every element by lr × (gradient + parameter)",
        by_hand.USED_UP, "", f"{MOVES}0.8 or 1.2 aft"),
    "NeverZeroed": Wrong("stage3_gradbuffer/buffer.py", {"self.flat.zero_()": "pass"}, SGD, "after step 2, ",
        "gradients were added to parameters: the buffer must be zeroed when these have been copied"),
    "NotCopied": Wrong("stage4_overlap/buffer.py", {"self.parameter.copy_main_to_model()": "pass"}, SIXTEEN,
        "nothing has moved, on any rank", by_hand.NOTHING["gradients"]),
    "ClipsItsShard": Wrong(Whole, {"clip_grad_norm_(self.params(), ": "clip_grad_norm_(self.shards[self.rank], "}, CLIP,
        "0.", "each rank takes the norm of its own shard"),
    "ClipsItsOwn": Wrong(Whole, {"        self.sync_grads()\n": ""}, CLIP, "0.57",
        "the norm is of this rank's own gradients: average them"),
    "NormAfter": Wrong(Whole, {CLIPPED: f"{CLIPPED}.clamp(max=max_norm)"}, CLIP, "0.05000 on rank 0, 0.05000",
        "the norm after clipping"),
    # The squares of all gradients are added over the ranks, which have the same.
    "NormSqrtD": Wrong(Whole, {CLIPPED: f"{CLIPPED} * self.world_size**0.5"}, CLIP, "0.83654 on rank 0, 0.83654",
        "√d times the norm"),
    "ClipsNothing": Wrong(Whole, {CLIPPED: CLIPPED.replace("max_norm", 'float("inf")')}, CLIP, "after step 1, ",
        "the norm is right, and the gradients were not scaled", "", ONE_PROCESS),
    "LosesItsState": Wrong(Whole, {"        self.optimizer.load_state_dict(saved[0])\n": "", LOADED: "        pass\n"},
        RESUME, "after step 3, ", "state and lr are lost: load_state_dict() leaves both as new"),
    "GathersBefore": Wrong(STAGE_2, {"        self.step_own()\n        self.sync_params()\n":
        "        self.sync_params()\n        self.step_own()\n"}, BY_HAND,
        "not moved: elements 4-7, 12-15 on rank 0, elements 0-3, 8-11 on rank 1", by_hand.TOO_EARLY),
    "StaleOwn": Wrong(Copies, {"param.copy_(received)": "param in self.copies or param.copy_(received)"}, BY_HAND,
        "not moved: elements 0-3, 8-11 on rank 0, elements 4-7, 12-15 on rank 1", by_hand.STALE),
    "WaitsForNothing": Wrong(Right, {"group_src=owner": "group_src=owner, async_op=True"}, BY_HAND, "",
        "a collective with async_op=True returns a work: wait() for it", "", "every "),
    # The bug that you will write, of stage 3's chapter: torch's zero_grad() sets param.grad to None.
    "LeavesZeroGradToTorch": Wrong(STAGE_3, {"def zero_grad(": "def unused("}, SGD, "after step 2, ",
        "parameters were taken for gradients: new gradients miss the buffer"),
    "WaitsForAll": Wrong(STAGE_4, {"in module._parameters.values()": "in module.parameters()"}, FIRST,
        "it has waited for 8 of 8 messages", "a module waits for its own parameters alone"),
    # What is read first arrives last.
    "ComesBackwards": Wrong(STAGE_4, {"in reversed(self.buckets)": "in self.buckets"}, FIRST,
        "it has waited for 2 of 8 messages", "send first the parameters that the"),
    # As many bytes as a sum where there are two ranks.
    "GathersGrads": Wrong(Right, {AVERAGED: "grads = [torch.empty_like(grad) for _ in range(self.d)]\n"
        "        dist.all_gather(grads, grad, group=self.group)\n" "        grad.copy_(sum(grads) / self.d)"}, BYTES,
        "with 4 ranks, 5.00 · 4Ψ · (d-1)/d bytes", "a rank gives the all-gather more than it"),
    "WholeCopies": Wrong(Right, {"self.optimizer.step()": "self.optimizer.step()\n"
        "        self.copies = [torch.stack([param, param.grad]) for param in self.params]"}, BYTES,
        "with 4 ranks, 18.00", "parameters and gradients take 8 and 1/4 of the moments 2: 8 more", "",
        "fewer bytes a parameter held after a step than DDP with AdamW holds: 16"),
    "ClipsAlways": Wrong(Whole, {CLIPPED: 'norm = torch.nn.utils.clip_grad_norm_(self.params(), float("inf"))\n'
        "        torch._foreach_mul_([param.grad for param in self.params()], max_norm / norm)\n        return norm"},
        CLIP, "after step 2, ", "gradients are scaled also where their norm is", "", ONE_PROCESS),
    "ForgetsTheScheduler": Wrong(Whole, {LOADED: ""}, RESUME, "after step 3, ",
        "the lr of a scheduler is lost: state_dict() must have it"),
    "SavesNoLr": Wrong(Whole, {"[hyperparameters(group) for group in self.param_groups]": "[]"}, RESUME,
        "after step 3, ", "the lr of a scheduler is lost: state_dict() must have it"),
    "StepsFrom0": Wrong(Whole, {"(saved[0])\n": "(saved[0])\n        for state in self.optimizer.state.values():\n"
        "            state['step'] = torch.zeros(())\n"}, RESUME, "after step 3, ",
        "moments are loaded, and AdamW's `step` is 0 again"),
    "ClipsTheFirstGroup": Wrong(Whole, {CLIPPED: CLIPPED.replace("self.params()", 'self.param_groups[0]["params"]')},
        CLIP, "0.28", "the norm of the first group alone"),
    "MeanOfUsers": Wrong(Whole, {"        super().sync_grads()\n        self.is": "        super().sync_grads()\n"
        "        for param, n_users in zip(self.params(), users.tolist()):\n"
        "            if n_users:\n                param.grad *= self.world_size / n_users\n        self.is"}, UNUSED,
        "after step 1, used_by_one_rank differs by up to 0.0017", "a parameter that some ranks use is averaged over"),
    # gloo ends a process that receives more than it waits for.
    "AveragesWhatItHas": Wrong(Whole, {"if n_users and param.grad is None": "if n_users < 0"}, UNUSED, "",
        levels.UNUSED, "", ""),
    "KeepsAverages": Wrong(Whole, {"        self.is_synced = True\n": "        self.is_synced = True\n"
        "        for param in {*self.params()} - {*self.shards[self.rank]}:\n            param.grad = None\n"},
        "a loop without zero_grad()", "1 wherever it has moved: 2.5 times the mean", by_hand.AVERAGED_AGAIN, "",
        f"{MOVES}0.8 or 1.2 after"),
    "KeepsZeros": Wrong(Whole, {"    @contextlib.contextmanager\n": "    def zero_grad(self, set_to_none=True):\n"
        "        set_to_none and super().zero_grad()\n\n    @contextlib.contextmanager\n"},
        "zero_grad() drops a backward", "after step 1, ", "zero_grad(set_to_none=False) leaves gradients as they are"),
    "StepsLate": Wrong(STAGE_1, {
        "        for group, own in": "        self.optimizer.step()\n        for group, own in",
        f"{UPDATED}\n        self.optimizer.step()\n": f"{UPDATED}\n"}, "a scheduler of torch", "after step 2, ",
        "what a scheduler writes arrives one step late"),
    "DecaysTwice": Wrong(STAGE_1, {f"{UPDATED}\n": f"{UPDATED}\n            torch._foreach_mul_(own['params'] or "
        "[torch.zeros(1)], 1 - own['lr'] * own['weight_decay'])\n", "    def step_own": "    @torch.no_grad()\n"
        "    def step_own"}, ADAMW, "after step 1, ", "weight decay is applied twice"),
    "DoublesEps": Wrong(STAGE_1, {"        defaults = optimizer_cls": "        if 'eps' in optimizer_kwargs:\n"
        "            optimizer_kwargs['eps'] *= 2\n        defaults = optimizer_cls"}, ADAMW, "after step 1, ",
        "eps is twice the constructor's"),
    "OneOfRank0": Wrong(Right, {"            self.average(param.grad)": "            self.average(param.grad) if "
        "param is not self.params[-1] else self.send(param.grad, 0)"}, BY_HAND,
        "elements 12-15 have moved by 0.1 on every rank: lr × rank 0's gradient", "all ranks have rank 0's gradient"),
    "Prints": Wrong(Right, {"grad /= self.d": "print('one more\\n' * 49 + 'one more')"}, BY_HAND,
        "0.8 wherever it has moved: 2 times the mean", by_hand.SUMMED),
    "ResumesLate": Wrong(Whole, {"saved[1]": "map(hyperparameters, self.optimizer.param_groups)"}, RESUME,
        "after step 3, ", "the lr that is loaded is that of the last step: a scheduler has"),
    # Kinds of faults that training alone doesn't show, or shows late.
    "NoRank0": Wrong(Right, {"dist.all_reduce(grad": "self.rank or grad.zero_()\n        dist.all_reduce(grad"},
        BY_HAND,
        "0.35 wherever it has moved: 0.875 times", "the gradient of rank 0 is missing from the sum"),
    "WithoutRank2": Wrong(Right, {"self.average(param.grad)":
        "self.rank == 2 and param is self.params[0] and param.grad.zero_()\n            self.average(param.grad)"},
        BY_3,
        "elements 0-4 have moved by 0.267 on every rank: lr × the gradients of ranks 0, 1, added and divided by 3",
        "the gradient of rank 2 is missing from the sum"),
    "CopiesInAThread": Wrong(Right, {"    def send(": "    def send_late(", "self.send(param, self.owner[param])":
        "before = param.clone()\n            self.send_late(param, self.owner[param])\n"
        "            threading.Timer(0.1, param.data.copy_, [param.clone()]).start()\n            param.copy_(before)"},
        BY_HAND, "not moved: elements 4-7, 12-15 on rank 0, elements 0-3, 8-11 on rank 1", by_hand.LATE),
    "OneStepOld": Wrong(Copies, {"param.copy_(received)": "param.copy_(self.sent.get(param, param))\n"
        "            self.sent[param] = received.clone()", "        self.copies =": "        self.sent = {}\n"
        "        self.copies ="}, BY_HAND, "nothing has moved, on any rank", by_hand.ONE_STEP_OLD),
    "MomentsIn16Bits": Wrong(Right, {"self.optimizer.step()": "self.optimizer.step()\n        for state in "
        "self.optimizer.state.values():\n            for name in {'exp_avg', 'exp_avg_sq'} & {*state}:\n"
        "                state[name].copy_(state[name].bfloat16())"}, ADAMW,
        "after step 2, ", "AdamW's moments are kept in 16"),
    "Seeds": Wrong(Right, {"self.optimizer.step()": "torch.manual_seed(0)\n        self.optimizer.step()"}, SGD,
        "a step changes their state", "a seed or a draw in step()", "", "a step leaves the random numbers of torch"),
    "Keeps": Wrong(Right, {"self.optimizer.step()":
        "self.log = [*getattr(self, 'log', []), self.params[0].grad.clone()]\n        self.optimizer.step()"},
        "nothing is kept from step", "0.49 bytes a parameter more in each step",
        "each step leaves something behind", "", "a rank holds as much after step 6 as after step 2"),
    "InHalf": Wrong(Whole, {"        super().sync_grads()\n        self.is": "        for param in self.params():\n"
        "            param.dtype == torch.bfloat16 and param.grad.copy_(param.grad.half())\n"
        "        super().sync_grads()\n        self.is"}, SIXTEEN,
        "in elements 0-15: -inf", "memory that nobody has written"),
    "NanToZero": Wrong(Whole, {"        super().sync_grads()\n        self.is": "        for param in self.params():\n"
        "            param.grad.nan_to_num_()\n        super().sync_grads()\n        self.is"}, "a nan on one rank",
        "elements 0-15 are finite on rank 0", "a nan is replaced", "", "where rank 1's gradient is nan, "),
    "SrcOfAllRanks": Wrong(STAGE_1, {"dist.broadcast(param, group=self.process_group, group_src=0)":
        "self.process_group or dist.broadcast(param, 0)"}, PLACES, "elements 0-15 of rank 1 are 1",
        "parameters are broadcast from the first rank", "", "the constructor gives every rank"),
    "DividesByAll": Wrong(STAGE_1, {"flat /= self.world_size": "flat /= dist.get_world_size()"}, PLACES,
        "0.267 wherever it has moved: 0.667 times",
        "the sum of the gradients is divided by 3: the number of ranks is 2", "", f"{MOVES}0.1 · (1 + 7) / 2"),
    "CountsTo100": Wrong(Whole, {"        super().step()\n": "        super().step()\n        for state in "
        "self.optimizer.state.values():\n            'step' in state and state['step'].clamp_(max=100)\n"}, "120 steps",
        "after step 10", levels.LONG, "", ONE_PROCESS),
    "ForgetsTheFrozen": Wrong(Whole, {"        super().step()\n": "        for param in self.params():\n"
        "            if param in self.frozen:\n                param.grad = None\n        super().step()\n",
        "    is_synced = False\n": "    is_synced = False\n\n    def __init__(self, params, *args, **kwargs):\n"
        "        super().__init__(params, *args, **kwargs)\n"
        "        self.frozen = {param for param in self.params() if not param.requires_grad}\n"},
        "a layer that was frozen", "after step 1, 0.weight, 0.bias differ", levels.THAWED),
    "KeepsStale": Wrong(Whole, {"param.grad = torch.zeros_like(param)": "param.grad = self.kept.get(param, param * 0)",
        "        self.is_synced = True\n": "        self.is_synced = True\n"
        "        self.kept = {param: param.grad.clone() for param in self.params() "
        "if param.grad is not None}\n", "    is_synced = False\n": "    is_synced = False\n"
        "    kept = {}\n"}, UNUSED,
        "after step 2, used_by_one_rank differs", levels.UNUSED),
    "LastNorm": Wrong(Whole, {CLIPPED: "norm = torch.nn.utils.clip_grad_norm_(self.params(), float('inf'))\n"
        "        used, self.last = getattr(self, 'last', norm), norm\n"
        "        torch._foreach_mul_([param.grad for param in self.params()], "
        "(max_norm / used).clamp(max=1))\n        return used"}, CLIP, "0.59152 on rank 0, 0.59152",
        "the norm of the step before"),
    "LosesMoments": Wrong(Whole, {"(saved[0])\n":
        "(saved[0])\n        for param, state in self.optimizer.state.items():\n"
        "            param.dtype == torch.bfloat16 and state['exp_avg'].zero_()\n"}, "the same, with parameters of 16",
        "after step 3, ", levels.MAIN_COPIES, "", "bfloat16: training goes on from state_dict()"),
}
SOURCES = {  # packages that are no class
    "exits_at_import": "import sys\n\nsys.exit(0)\n",
    "loops_at_import": "import threading\n\nthreading.Event().wait()\n",
    "computes_at_import": "while True:\n    pass\n",
    "raises_when_asked": """
class Raises(type):
    def __getattribute__(cls, name):
        raise RuntimeError("don't ask")


class DistributedOptimizer(metaclass=Raises):
    pass
""",}
