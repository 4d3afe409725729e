"""Optimizers for `make grade`: right ones, and what learners get wrong, a mistake a class, with what it is told.

A class becomes a package of its own, named after it: test_grade.py writes one that imports it under the name that the
grader looks for.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

from stage1_naive_broadcast.optimizer import ShardedOptimizer as Stage1
from stage1_naive_broadcast.optimizer import hyperparameters
from stage3_gradbuffer.buffer import GradBuffer
from stage3_gradbuffer.optimizer import ShardedOptimizer as Stage3
from stage4_overlap.buffer import Bucket
from stage4_overlap.optimizer import ShardedOptimizer as Stage4

FILE = "tests/grade/graded.py:"
SGD, ADAMW = "SGD: ranks equal each other and one process, 2 ranks", "AdamW"
BY_HAND, BY_3 = "16 elements by hand, 2 ranks", "16 elements by hand, 3 ranks"
STATE, BYTES = "the state is spread over 2 ranks", "collectives and bytes"
GROUPS, CLIP = "three groups, with their own lr and weight decay", "clip_grad_norm_ equals torch's on the whole model"
RESUME, FIRST = "state_dict() and load_state_dict() go on where they left off", "prefetch_params: the first layer waits"
MOVES = "every element moves by lr × mean gradient, "
ONE_PROCESS = "2 ranks train like one process that has the batches of all"
ENDS, LIVES = "every rank ends this check", "every rank lives until the end of th"
NO_EXCEPTION = "no exception"
EXPECTED = {  # check -> its first line, where a class says nothing else
    BY_HAND: f"{MOVES}0.1 · (1 + 2) / 2 = 0.15, on every rank",
    BY_3: f"{MOVES}0.1 · (1 + 2 + 4) / 3 = 0.233, on every rank",
    "parameters of 16 bits": f"{MOVES}1 · (1 + 2) / 2 = 1.5, on every rank",
    STATE: "AdamW's state exists once, about 1/2 on each rank",
    BYTES: "at most 3 · 4Ψ · (d-1)/d bytes sent by a rank",
    CLIP: "clip_grad_norm_ returns the norm of the averaged gradients of the whole model",
    FIRST: "the first layer computes while the parameters of others are under way"}
WRONG = {}  # class -> the check that fails, and what its lines begin with


def told(check, came, cause=None, also=None, expected=None):
    """Of a class that is wrong: what its lines begin with. An "r" is the number of whichever rank is the first."""
    first = EXPECTED.get(check, ONE_PROCESS) if expected is None else expected
    lines = [("expected  ", first), ("came      ", came), ("", also), ("cause     ", cause)]
    said = [start + line for start, line in lines if line is not None]
    return lambda cls: WRONG.setdefault(cls, (check, said)) and cls


def mistake(base, method, *lines, **more):
    """Of a function, which becomes a class: `base`, with the function for `method`, is wrong."""
    return lambda function: told(*lines, **more)(
        type(function.__name__, (base,), {method: function}))


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
    """Right: one flat tensor, padded to a multiple of 64 elements a rank; shards ignore parameters."""
    def numel_of_shards(self, numel):
        return -(-numel // (64 * self.d)) * 64 * self.d

    def owned(self):
        numel = sum(param.numel() for param in self.params)
        self.flat, start = torch.zeros(max(numel, self.numel_of_shards(numel))), 0
        for param in self.params:
            view = self.flat[start : start + param.numel()].view(param.shape)
            param.data = view.copy_(param.data)
            start += param.numel()
        self.shards = self.flat[: self.numel_of_shards(numel)]
        self.shard = torch.nn.Parameter(self.shards.view(self.d, -1)[self.rank])
        return [self.shard]

    @torch.no_grad()
    def step(self):
        grads = torch.cat([param.grad.reshape(-1) for param in self.params])
        padded = torch.nn.functional.pad(grads / self.d, (0, self.shards.numel() - grads.numel()))
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, padded, group=self.group)
        self.optimizer.step()
        dist.all_gather_into_tensor(self.shards, self.shard.data.clone(), group=self.group)


class Chunks(Right):
    """Right: every tensor is cut into d padded chunks, which travel as lists of tensors."""
    def owned(self):
        self.own = [torch.nn.Parameter(self.chunks(param.data)[self.rank].clone()) for param in self.params]
        return self.own

    def chunks(self, tensor):
        numel = -(-tensor.numel() // self.d)
        padded = torch.nn.functional.pad(tensor.reshape(-1), (0, numel * self.d - tensor.numel()))
        return list(padded.view(self.d, numel))

    @torch.no_grad()
    def step(self):
        for param, own in zip(self.params, self.own):
            own.grad = torch.empty_like(own)
            dist.reduce_scatter(own.grad, [chunk.contiguous() for chunk in self.chunks(param.grad)], group=self.group)
            own.grad /= self.d
        self.optimizer.step()
        for param, own in zip(self.params, self.own):
            parts = [torch.empty_like(own) for _ in range(self.d)]
            dist.all_gather(parts, own.data, group=self.group)
            param.copy_(torch.cat(parts)[: param.numel()].view(param.shape))


class Padded(Right):
    """Right: one all-gather of padded shards, as in stage 2."""
    @torch.no_grad()
    def step(self):
        for param in self.params:
            self.average(param.grad)
        self.stepped()
        self.gathered()

    def stepped(self):
        self.optimizer.step()

    def gathered(self):
        shards = [[param for param in self.params if self.owner[param] == rank] for rank in range(self.d)]
        longest = max(sum(param.numel() for param in shard) for shard in shards)
        own = torch.cat([torch.zeros(0), *(param.data.reshape(-1) for param in self.packed(shards))])
        gathered = torch.zeros(self.d * longest)
        padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        for rank, shard in enumerate(shards):
            self.cut(gathered, rank, shard, self.start(rank, longest, shards))

    def cut(self, gathered, rank, shard, start):
        for param in shard:
            param.copy_(gathered[start : start + param.numel()].view(param.shape))
            start += param.numel()

    def packed(self, shards):
        return shards[self.rank]

    def start(self, rank, longest, shards):
        return rank * longest


class RoundRobin(Right):
    """Sharded, but unevenly: of layers with a weight and a bias, rank 0 of 2 gets all the weights."""
    def owned(self):
        self.owner = {param: index % self.d for index, param in enumerate(self.params)}
        return super().owned()


class Whole(Stage1):
    """Stage 1's core, and what level 2 asks for besides."""
    is_synced = False

    def sync_grads(self):
        if not self.is_synced:
            super().sync_grads()
        self.is_synced = True

    @torch.no_grad()
    def step(self):
        super().step()
        self.is_synced = False

    def no_sync(self):
        return contextlib.nullcontext()  # gradients travel in step(), and nowhere else

    def clip_grad_norm_(self, max_norm):
        self.sync_grads()
        return torch.nn.utils.clip_grad_norm_(self.clipped(), max_norm)

    def clipped(self):
        return [param for group in self.param_groups for param in group["params"]]

    def state_dict(self):
        return self.optimizer.state_dict(), [hyperparameters(group) for group in self.param_groups]

    def load_state_dict(self, saved):
        self.optimizer.load_state_dict(saved[0])
        for group, its in zip(self.param_groups, saved[1]):
            group.update(its)


@mistake(Right, "average", BY_HAND, "0.3 wherever it has moved: 2 times as far",
         "the gradients are summed and not averaged: divide by the number of ranks")
def Summed(self, grad):
    dist.all_reduce(grad, group=self.group)


@mistake(Right, "average", BY_HAND, "0.075 wherever it has moved: 1/2 as far",
         "the gradients are divided by the number of ranks twice")
def AveragedTwice(self, grad):
    grad /= self.d
    Right.average(self, grad)


@mistake(Right, "average", BY_HAND, "moved by rank 0: 0.1, 0.2; rank 1: 0.1, 0.2",
         "each rank steps with its own gradients")
def AveragesACopy(self, grad):
    """Averages a copy of each gradient, as torch.cat makes one: every rank steps with its own."""
    Right.average(self, grad.clone())


@mistake(Right, "send", BY_HAND, "not moved: elements 4-7, 12-15 on rank 0, elements 0-3, 8-11 on rank 1",
         "what was received did not reach the parameters: torch.cat copies")
def ReceivesACopy(self, param, owner):
    """Flattens what a rank owns with torch.cat, broadcasts that, and forgets to copy back."""
    flat = torch.cat([param.reshape(-1)])
    dist.broadcast(flat, group=self.group, group_src=owner)


@mistake(Right, "owned", BY_HAND, "nothing has moved, on any rank",
         "the inner optimizer's parameters have no gradients: they are copies")
def Noop(self):
    """All replicas agree, because nothing ever moves: the inner optimizer has copies of the parameters."""
    return [param.clone().detach().requires_grad_() for param in Right.owned(self)]


@mistake(Right, "send", BY_HAND,
         "nothing has moved in the end; in between rank 0 elements 0-3, 8-11, rank 1 elements 4-7, 12-15 had",
         "what was stepped was overwritten by a rank that")
def NotTheOwner(self, param, owner):
    Right.send(self, param, (owner + 1) % self.d)


@mistake(Right, "owned", BY_HAND, "elements 12-15 have moved on no rank", "nobody owns these parameters")
def Nobodys(self):
    return [param for param in Right.owned(self) if param is not self.params[-1]]


@mistake(Right, "__init__", BY_HAND, "0.0015 wherever it has moved: 0.01 times the mean gradient",
         "lr and weight_decay of the constructor do not reach the inner optimizer")
def ForgetsLr(self, params, optimizer_cls, *, process_group=None, lr, **kwargs):
    Right.__init__(self, params, optimizer_cls, process_group=process_group)


@mistake(Right, "average", BY_HAND, "0.75 wherever it has moved: 5 times as far", "the figures don't give one away")
def FiveTimes(self, grad):
    Right.average(self, grad)
    grad *= 5


@mistake(Right, "average", BY_HAND, "-0.15 wherever it has moved: -1 times", "step against the gradient")
def Adds(self, grad):
    Right.average(self, grad)
    grad.neg_()


@mistake(Right, "__init__", BY_HAND, "0.3 wherever it has moved: 2 times as far",
         "the inner optimizer has the right gradients, and another lr than the constructor's")
def ScalesLr(self, params, optimizer_cls, *, process_group=None, lr=1e-3, **kwargs):
    """Multiplies lr by the number of ranks, as some training loops do for larger batches."""
    lr *= dist.get_world_size(process_group)
    Right.__init__(self, params, optimizer_cls, process_group=process_group, lr=lr, **kwargs)


@mistake(Flat, "numel_of_shards", BY_3, "elements 15 have moved on no rank", "nobody owns these")
def DropsTheRest(self, numel):
    """Cuts the flat parameters into d parts, and drops what is left over."""
    return numel // self.d * self.d


@mistake(Right, "send", BY_HAND, "in elements 0-15: the mean gradient", "a gradient was taken for a parameter")
def GradientForParameter(self, param, owner):
    Right.send(self, param.grad, owner)
    param.copy_(param.grad)


@mistake(Right, "average", BY_3, "0.35 wherever it has moved: 1.5 times the mean gradient",
         "the sum of the gradients is divided by 2: the number of ranks is 3 here")
def Half(self, grad):
    dist.all_reduce(grad, group=self.group)
    grad /= 2


@mistake(Padded, "start", BY_3, "in element 11: 0, as padding is; in elements 12-15: what elements 11-14 should hold",
         "padding was taken for parameters")
def Padding(self, rank, longest, shards):
    """Cuts the gathered shards as if there were no padding between them."""
    return sum(param.numel() for shard in shards[:rank] for param in shard)


@mistake(Padded, "packed", BY_3,
         "in elements 11-13: what elements 13-15 should hold; in elements 14-15: what elements 11-12",
         "who packs and who cuts disagree")
def AnotherOrder(self, shards):
    """Packs a shard with the smallest parameter first, and cuts it in the model's order."""
    return sorted(shards[self.rank], key=torch.Tensor.numel, reverse=True)


@mistake(Right, "send", BY_HAND, f"rank 0 hangs in barrier ({FILE}",
         "the ranks part at collective 9: barrier on rank 0, broadcast of 16 bytes from rank 0 on rank",
         also=f"rank 1 hangs in broadcast of 16 bytes from rank 0 ({FILE}", expected=ENDS)
def Hangs(self, param, owner):
    """Rank 0 alone waits for all, before it writes a log, say."""
    if self.rank == 0:
        dist.barrier(group=self.group)
    Right.send(self, param, owner)


@mistake(Right, "step", BY_HAND, f"rank 0 hangs in {FILE}", "all ranks have called the same collectives",
         also=f"rank 1 has ended; its last was broadcast of 16 bytes from rank 1 ({FILE}", expected=ENDS)
def WaitsAlone(self):
    """Rank 0 waits for something that isn't a collective, and never comes."""
    Right.step(self)
    if self.rank == 0:
        threading.Event().wait()


@mistake(Right, "send", BY_HAND, "rank 0 hangs in broadcast of 16 bytes from rank 1 (",
         "the ranks part at collective 9: broadcast of 16 bytes from rank 1 on rank 0, from rank",
         also="rank 1 hangs in broadcast of 16 bytes from rank 0 (", expected=ENDS)
def OtherRoots(self, param, owner):
    """Each rank waits for what others own, and nobody sends its own: the ranks broadcast from different roots."""
    if owner != self.rank:
        Right.send(self, param, owner)


@mistake(Right, "send", BY_HAND, "rank 1: ValueError: the shard of rank 1 has the wrong size", also=f"in {FILE}",
         expected=NO_EXCEPTION)
def Raises(self, param, owner):
    if self.rank == 1:
        raise ValueError("the shard of rank 1 has the wrong size")
    Right.send(self, param, owner)


@mistake(Right, "step", BY_HAND, "rank r: RuntimeError: a leaf Variable that requires grad is being",
         "step() and the constructor must run under torch.no_grad()", also=f"in {FILE}", expected=NO_EXCEPTION)
def WithGrad(self):
    for param in self.owned():
        param -= 0.1 * param.grad


@mistake(Right, "step", BY_HAND, "rank r: SystemExit: 0", "the program that trains decides when a rank ends",
         also=f"in {FILE}", expected=NO_EXCEPTION)
def Exits(self):
    sys.exit(0)


@mistake(Right, "average", BY_HAND, "rank 1 ended with exit code 0", "os._exit() or a crash ended it",
         also=f"after broadcast of 16 bytes from rank 0 ({FILE}", expected=LIVES)
def Leaves(self, grad):
    """Rank 1 ends in the middle of a step, as if all were well."""
    if self.rank == 1:
        os._exit(0)
    Right.average(self, grad)


@told("the interface", "DistributedOptimizer has no step()",
      "docs/exercise.md lists the methods that each level asks for", expected="methods step() and zero_grad()")
class NoStep(Right):
    step = None

    def update(self):
        return super().step()


@mistake(Right, "__init__", "the interface", "DistributedOptimizer(optimizer): too many positional arguments", "docs/",
         expected="DistributedOptimizer(params, optimizer_cls, *, process_group=None, **")
def OtherArguments(self, optimizer):
    Right.__init__(self, optimizer.param_groups[0]["params"], type(optimizer), **optimizer.defaults)


@mistake(Right, "__init__", "all ranks start from rank 0's parameters", "elements 0-15 of rank 1 are 1",
         "parameters are broadcast from rank 0", expected="the constructor gives every rank the")
def NoBroadcast(self, params, *args, **kwargs):
    params = list(params)
    own = [param.detach().clone() for param in params]
    Right.__init__(self, params, *args, **kwargs)
    with torch.no_grad():
        for param, value in zip(params, own):
            param.copy_(value)


@told("all ranks start from rank 0's parameters",
      "so it is; but a step with gradients of 0 makes elements 4-7, 12-15 of rank 0 1",
      "what the inner optimizer steps was copied before the broadcast", expected="the constructor gives every rank the")
class CopiesTooEarly(Right):
    def __init__(self, params, *args, **kwargs):
        params = list(params)
        self.main = {param: torch.nn.Parameter(param.detach().clone()) for param in params}
        super().__init__(params, *args, **kwargs)

    def owned(self):
        return [self.main[param] for param in super().owned()]

    @torch.no_grad()
    def step(self):
        for param, main in self.main.items():
            self.average(param.grad)
            main.grad = param.grad
        self.optimizer.step()
        for param, main in self.main.items():
            param.copy_(main)
            self.send(param, self.owner[param])


@mistake(Right, "average", BY_3, "0.23", "almost right, to two or three digits")
def In16Bits(self, grad):
    """Gradients travel, and are summed, in 16 bits."""
    short = grad.bfloat16()
    Right.average(self, short)
    grad.copy_(short)


@mistake(Right, "zero_grad", SGD, "after step 2, 0.weight, 0.bias, 2.weight and 3 more",
         "gradients of the step before are added again: zero_grad() must forget them")
def KeepsGrads(self):
    """zero_grad() forgets nothing."""


@told(ADAMW, "after step 2, ", "the optimizer's state is new in each step")
class NewState(Right):
    def __init__(self, params, optimizer_cls, *, process_group=None, **kwargs):
        self.make = lambda: optimizer_cls([{"params": self.owned()}], **kwargs)
        super().__init__(params, optimizer_cls, process_group=process_group, **kwargs)

    def step(self):
        self.optimizer = self.make()
        super().step()


@mistake(Stage4, "on_grad_ready", "gradients in another order on rank 1",
         "of elements 0-3 rank 0's gradient was averaged with rank 1's of elements 12-15",
         "gradients come in another order on rank 1: what leaves must leave in one order",
         expected="every element moves by lr × mean gradient, 0.15, 0.3, 0.6, 1.2 of the parameters")
def AsTheyCome(self, param):
    bucket = self.bucket_of[param]
    bucket.ready.add(param)
    if bucket.is_full():
        self.send_grads(bucket)


@mistake(Right, "__init__", "one parameter, 3 ranks", "rank r: ValueError: optimizer got an empty parameter list",
         "a rank owns nothing here", also="in tests/grade/graded.py", expected=NO_EXCEPTION)
def NothingOwned(self, params, optimizer_cls, *, process_group=None, **kwargs):
    Right.__init__(self, params, optimizer_cls, process_group=process_group, **kwargs)
    self.optimizer = optimizer_cls(self.owned(), **kwargs)


@mistake(Stage4, "wait_for_own_params", "prefetch_params: rank 1 is late", "after step 3, ",
         "a module reads parameters that have not arrived: each must wait for its own", expected="")
def NoWait(self, module, _):
    """Parameters are prefetched, and no module waits for its own."""


@mistake(Right, "owned", STATE, "66560 of its 66560 elements more than once: 100%", "every rank steps every parameter")
def Unsharded(self):
    return self.params


@mistake(Right, "owned", STATE, "1024 of its 66560 elements more than once: 51%",
         "some parameters are stepped on several ranks")
def OwnsTwice(self):
    """The parameters of one dimension are stepped on every rank: they are small, and their state isn't spread."""
    return [param for param in self.params if self.owner[param] == self.rank or param.shape == (64,)]


@mistake(Right, "owned", STATE, "1.5 times, with padding", "pad a shard by less")
def PadsMuch(self):
    """Right, but for a whole shard of padding."""
    numel = sum(param.numel() for param in self.params) // 4
    self.padding = torch.nn.Parameter(torch.zeros(numel))
    self.padding.grad = torch.zeros(numel)
    return [*Right.owned(self), self.padding]


@mistake(Right, "send", BYTES, "with 4 ranks, 4.00 · 4Ψ · (d-1)/d bytes, in 32 all_reduce",
         "an all-reduce takes twice the bytes of a broadcast")
def AllReducesParams(self, param, owner):
    if self.rank != owner:
        param.zero_()
    dist.all_reduce(param, group=self.group)


@told(GROUPS, "after step 1, 0.weight, 0.bias … moved with the constructor's lr and the constructor's weight",
      "every parameter is stepped with the")
class OneGroup(Whole):
    def shard(self, groups):
        super().shard([{**self.defaults, "params": [param for group in groups for param in group["params"]]}])

    def step_own(self):
        self.optimizer.step()


@mistake(Whole, "step_own", GROUPS, "after step 1, 0.weight, 0.bias … moved with group 0's lr and",
         "the first group's lr is taken for all")
def FirstLr(self):
    for own in self.optimizer.param_groups:
        own["lr"] = self.param_groups[0]["lr"]
    self.optimizer.step()


@mistake(Whole, "step_own", GROUPS,
         "after step 1, 0.weight, 0.bias … moved with its own lr and the constructor's weight decay",
         "the weight decay of a group is lost")
def LostDecay(self):
    for group, own in zip(self.param_groups, self.optimizer.param_groups):
        own.update(lr=group["lr"], weight_decay=self.defaults["weight_decay"])
    self.optimizer.step()


@told(GROUPS, "after step 1, 0.weight moved with group 0's lr and its own",
      "groups are paired wrongly: a rank that owns nothing of a group still needs that")
class PairsWrongly(Stage1):
    """Leaves a group out where a rank owns nothing of it: the groups after it get another's lr."""
    def shard(self, groups):
        super().shard(groups)
        self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group["params"]]

    def step_own(self):
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own["lr"] = group["lr"]
        self.optimizer.step()


@mistake(Whole, "step_own", "a scheduler of torch", "after step 2, ", "the lr of a scheduler doesn't arrive")
def LateLr(self):
    """The inner optimizer keeps the hyperparameters of the start: a scheduler writes into the outer groups."""
    self.optimizer.step()


@mistake(Whole, "step_own", "a scheduler that writes betas, too", "after step 2, ",
         "the scheduler's lr arrives, its betas don't")
def OnlyLr(self):
    for group, own in zip(self.param_groups, self.optimizer.param_groups):
        own["lr"] = group["lr"]
    self.optimizer.step()


@told("three micro-batches equal one large batch", "after step 1, ", "micro-batches that were averaged are sent again")
class SendsAgain(Whole):
    def shard(self, groups):
        super().shard(groups)
        self.sums = {}
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.ready = 0
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.count)

    @torch.no_grad()
    def count(self, _):
        self.ready += 1
        if self.ready == len(self.params):
            self.ready = 0
            self.average([param.grad for param in self.params])
            for param in self.params:
                self.sums[param] = self.sums.get(param, 0) + param.grad

    def sync_grads(self):
        for param in self.params:
            param.grad = self.sums.pop(param)


@mistake(Whole, "no_sync", "the same, inside no_sync()", "after step 1, ", "only the last micro-batch counts")
@contextlib.contextmanager
def DropsMicroBatches(self):
    yield
    self.zero_grad()


@mistake(Whole, "no_sync", "the same, inside no_sync()", "after step 1, ", "each rank steps with its own gradients")
@contextlib.contextmanager
def NeverSyncsAgain(self):
    """no_sync() notes that gradients are synchronised, and nobody takes it back."""
    self.is_synced = True
    yield


@mistake(Whole, "no_sync", "the same, inside no_sync()", "6 collectives in 3 steps",
         "gradients must stay on their rank", expected="no communication inside no_sync()")
@contextlib.contextmanager
def SyncsInNoSync(self):
    """Averages the gradients at the end of no_sync(), which is right, and no saving."""
    yield
    Stage1.sync_grads(self)


@mistake(Stage3, "step", "a loop without zero_grad()", "step 2 moved every element by lr × (gradient + parameter)",
         "the second step added its gradients to parameters",
         expected="every element moves by lr × mean gradient, 0.3 or 0.45 aft")
@torch.no_grad()
def NotZeroed(self):
    """step() leaves parameters in the buffer, and trusts the loop to call zero_grad()."""
    self.sync_grads()
    self.step_own()
    self.sync_params()


class UnfilledBuffer(GradBuffer):
    def reduce_scatter_grads(self):
        before = self.main_grad_shard.clone()
        super().reduce_scatter_grads()
        if self.main_grad_shard is not self.grad_shard:
            self.main_grad_shard.copy_(before)


@told("parameters of 16 bits", "nothing has moved, on any rank",
      "the inner optimizer's gradients are all 0: main gradients must be filled")
class Unfilled(Stage3):
    buffer_class = UnfilledBuffer


class NotCopiedBucket(Bucket):
    def start_param_sync(self):
        self.param_sync = self.transport.all_gather(self.shards)


@told("parameters of 16 bits", "nothing has moved, on any rank",
      "the inner optimizer stepped copies (main parameters), which were not copied to the mode")
class NotCopied(Stage4):
    bucket_class = NotCopiedBucket


@mistake(Whole, "clipped", CLIP, "0.38", "each rank takes the norm of its own shard")
def ClipsItsShard(self):
    return self.shards[self.rank]


@mistake(Whole, "clip_grad_norm_", CLIP, "0.57", "the norm is of this rank's own gradients: average them")
def ClipsItsOwn(self, max_norm):
    return torch.nn.utils.clip_grad_norm_(self.clipped(), max_norm)


@mistake(Whole, "clip_grad_norm_", CLIP, "0.05000 on rank 0, 0.05000", "the norm after clipping")
def NormAfter(self, max_norm):
    return Whole.clip_grad_norm_(self, max_norm).clamp(max=max_norm)


@mistake(Whole, "clip_grad_norm_", CLIP, "0.83654 on rank 0, 0.83654", "√d times the norm")
def NormSqrtD(self, max_norm):
    """Adds the squares of all gradients over the ranks, which have the same: the norm is sqrt(d) times too large."""
    self.sync_grads()
    squares = sum((param.grad**2).sum() for param in self.clipped())
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for param in self.clipped():
        param.grad *= torch.clamp(max_norm / norm, max=1)
    return norm


@mistake(Whole, "clip_grad_norm_", CLIP, "after step 1, ", "the norm is right, and the gradients were not scaled",
         expected=ONE_PROCESS)
def ClipsNothing(self, max_norm):
    return Whole.clip_grad_norm_(self, float("inf"))


@mistake(Whole, "load_state_dict", RESUME, "after step 3, ",
         "state and lr are lost: load_state_dict() leaves both as new")
def LosesItsState(self, state_dict):
    """load_state_dict() loads the state into the outer optimizer, which steps nothing."""
    self.loaded = state_dict


# --------------------------------------------------------------------------------- what was accepted, or misunderstood


@told(BY_HAND, "not moved: elements 4-7, 12-15 on rank 0, elements 0-3, 8-11 on rank 1",
      "nothing is sent after the inner optimizer has stepped: what it steps must travel after")
class GathersBefore(Padded):
    def stepped(self):
        pass

    def gathered(self):
        super().gathered()
        super().stepped()


@told(BY_HAND, "not moved: elements 0-3, 8-11 on rank 0, elements 4-7, 12-15 on rank 1",
      "what a rank has stepped reaches the others and not its own model: its own part is to be copied, too")
class StaleOwn(Padded):
    def owned(self):
        self.main = {param: torch.nn.Parameter(param.detach().clone()) for param in super().owned()}
        return self.main.values()

    def packed(self, shards):
        return [self.main[param] for param in shards[self.rank]]

    def stepped(self):
        for param, main in self.main.items():
            main.grad = param.grad
        super().stepped()

    def cut(self, gathered, rank, *more):
        if rank != self.rank:
            super().cut(gathered, rank, *more)


@mistake(Right, "send", BY_HAND, None, "a collective with async_op=True returns a work: wait() for it",
         expected="every ")
def WaitsForNothing(self, param, owner):
    dist.broadcast(param, group=self.group, group_src=owner, async_op=True)


@mistake(Stage4, "sync_params", BY_HAND, None, "step() waits for the parameters by finish_param_sync(), unless",
         expected="every ")
def NeverFinishes(self):
    """step() waits for no parameters, also where nobody prefetches them."""
    self.prefetching = True
    Stage4.sync_params(self)


@told(SGD, "after step 2, ", "parameters were taken for gradients: new gradients miss the buffer")
class LeavesZeroGradToTorch(Stage3):
    """The bug that you will write, of stage 3's chapter: torch's zero_grad() sets param.grad to None."""
    zero_grad = torch.optim.Optimizer.zero_grad


@mistake(Stage3, "zero_grad", SGD, "after step 2, ", "gradients were added to parameters: the buffer must be zeroed")
def NeverZeroes(self, set_to_none=True):
    """zero_grad() does nothing at all."""


@mistake(Stage4, "sync_params", "gradients are gone after a step", "0.45 wherever it has moved: 3 times",
         "gradients of the step before are added: the docstring of step() says that they are gone",
         expected=f"{MOVES}0.3 after two")
def NeverEmpties(self):
    """Adds to the gradients of the step before, until zero_grad() is called."""
    for bucket in reversed(self.buckets):
        bucket.start_param_sync()
    if not self.prefetching:
        self.finish_param_sync()


@mistake(Stage4, "wait_for_own_params", FIRST, "it has waited for 8 of 8 messages",
         "a module waits for its own parameters alone")
def WaitsForAll(self, module, _):
    for param in module.parameters():
        if param in self.bucket_of:
            self.bucket_of[param].finish_param_sync()


@mistake(Stage4, "sync_params", FIRST, "it has waited for 2 of 8 messages", "what the forward pass reads first must")
def ComesBackwards(self):
    """Parameters come back in the order of the backward pass: what is read first arrives last."""
    self.buckets.reverse()
    Stage4.sync_params(self)
    self.buckets.reverse()


@mistake(Right, "average", BYTES, "with 4 ranks, 5.00 · 4Ψ · (d-1)/d bytes", "a rank gives the all-gather more than it")
def GathersGrads(self, grad):
    """Gathers all gradients of all ranks, and averages them: as many bytes as a sum where there are two ranks."""
    grads = [torch.empty_like(grad) for _ in range(self.d)]
    dist.all_gather(grads, grad, group=self.group)
    grad.copy_(sum(grads) / self.d)


@mistake(Right, "average", BYTES, "with 4 ranks, 18.00", "beside parameters and gradients a rank holds its own 1/d",
         expected="fewer bytes a parameter held after a step than DDP with AdamW holds: 16")
def WholeCopies(self, grad):
    """Keeps an fp32 copy of all parameters, and of all gradients."""
    Right.average(self, grad)
    self.copies = [torch.stack([param, param.grad]) for param in self.params]


@mistake(Whole, "clip_grad_norm_", CLIP, "after step 2, ", "gradients are scaled also where their norm is",
         expected=ONE_PROCESS)
def ClipsAlways(self, max_norm):
    """Scales to max_norm, also what is smaller."""
    norm = Whole.clip_grad_norm_(self, float("inf"))
    for param in self.clipped():
        param.grad *= max_norm / norm
    return norm


@mistake(Whole, "load_state_dict", RESUME, "after step 3, ",
         "the lr of a scheduler is lost: state_dict() has the groups'")
def ForgetsTheScheduler(self, saved):
    self.optimizer.load_state_dict(saved[0])


@mistake(Whole, "load_state_dict", RESUME, "after step 3, ",
         "the lr that is loaded is that of the last step: a scheduler has")
def ResumesLate(self, saved):
    self.optimizer.load_state_dict(saved[0])
    for group, own in zip(self.param_groups, self.optimizer.param_groups):
        group.update(hyperparameters(own))


class Slow(Right):
    """One rank computes for a while, and the other waits for it: no hang."""
    def step(self):
        until = time.monotonic() + 5 * (self.rank == 0)
        while time.monotonic() < until:
            pass
        super().step()


class Forks(Right):
    """The constructor starts a process that nobody ends."""
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if len(self.params) == 1 and self.rank == 0:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


RIGHT = {Right: 1, Flat: 3, Chunks: 3, Padded: 2, RoundRobin: 1}  # of level 1's interface -> its rung
SOURCES = {  # those that are no class -> the package
    "five": "DistributedOptimizer = 5\n",
    "exits_at_import": "import sys\n\nsys.exit(0)\n",
    "loops_at_import": "import threading\n\nthreading.Event().wait()\n",
    "computes_at_import": "while True:\n    pass\n",
    "raises_when_asked": """
class Raises(type):
    def __getattribute__(cls, name):
        raise RuntimeError("don't ask")


class DistributedOptimizer(metaclass=Raises):
    pass
""",
    "judges_itself": """
import grade.on_ranks
from tests.grade.graded import Summed as DistributedOptimizer

grade.on_ranks.play = lambda candidate, run: run.in_one_process()
""",
    "judges_itself_later": """
import grade.on_ranks
from tests.grade import graded


class DistributedOptimizer(graded.Summed):
    def step(self):
        super().step()
        grade.on_ranks.in_one_process = None
"""}
