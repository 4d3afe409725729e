"""Hostile input: steps out of turn, gradients in odd forms, ranks that disagree, optimizers that can't be cut.

Each is what replicated training with plain torch makes of it, or the same error on every rank: one line that names the
parameter, before anything is changed, after which training can go on. What the constructor refuses is in test_contract.
"""

import copy
import functools
import pickle
import re

import pytest
import torch

from harness import STAGE_2, STAGE_3, STAGE_4, STAGES
from tests.common import Net, batch, error_of, loss_of, on_ranks, one_rank_of, optimizer_of, trainable
from tests.pairs import ADAMW, Pair, Replicated, assert_same, backward, parameter_of, sgd_of, sums_commute
from tests.stages.test_contract import Lamb

UNUSED = {STAGE_4: {"find_unused_parameters": True}}


SCRIPTS = {  # b: backward, s: step, z: zero_grad, c: clip, +: add_param_group -> where stages 1 and 2 arrive, 3, and 4
    "s bs": (-1, -1, -1),
    "bss bs": (-4, -2, -2),
    "bzs zzbs": (-1, -1, -1),
    "bbs bsz": (-5, -3, -3),
    "cs bs": (-1, -1, -1),
    "b+sz bs": (-2, -2, -2),
    "bc+sz bs": (-2, -2, -2),
}
@pytest.mark.parametrize("stage, finds_unused", [*((stage, False) for stage in STAGES), (STAGE_4, True)])
@on_ranks(script=SCRIPTS)
def test_steps_out_of_turn_are_those_of_torch(rank, stage, finds_unused, script):
    """Call methods in an odd order. Each backward pass adds a gradient of 1, and a step subtracts what there is.

    `step` keeps the gradients in stages 1 and 2, as torch does; in stage 3 it sets them to zero, in stage 4 to None.
    Stage 4 refuses to step or clip without any gradient, unless it looks for unused parameters, and to add a group
    between backward and step.
    """
    weight, added = parameter_of(0, rank), parameter_of(0, rank)
    optimizer = sgd_of(stage, [weight], **(UNUSED[STAGE_4] if finds_unused else {}))
    calls = {
        "b": lambda: (weight.sum() + added.sum()).backward(),
        "s": optimizer.step,
        "z": optimizer.zero_grad,
        "c": lambda: optimizer.clip_grad_norm_(100.0),
        "+": lambda: optimizer.add_param_group({"params": [added]}),
    }
    has_gradient = False
    for letter in script.replace(" ", ""):
        refusal = None
        if stage == STAGE_4 and letter == "+":
            refusal = "add_param_group() between backward() and step()"
        elif stage == STAGE_4 and letter in "sc" and not has_gradient and not finds_unused:
            refusal = "no gradient on some rank for parameter 0 of group 0"
        if refusal:
            before = weight.tolist()
            assert refusal in error_of(calls[letter])
            assert weight.tolist() == before
        else:
            calls[letter]()
        has_gradient = letter == "b" or has_gradient and letter in "c+"
    assert weight.unique().tolist() == [SCRIPTS[script][max(0, STAGES.index(stage) - 1)]]


@on_ranks(2, was_frozen=[False, True])
def test_backward_after_gradients_are_averaged(rank, stage, was_frozen):
    """What is added to averaged gradients is averaged with them; stage 3, which has only a shard of them, refuses."""
    weight = parameter_of(0, rank, n=64).requires_grad_(not was_frozen)
    optimizer = sgd_of(stage, [weight])
    weight.requires_grad_(True)
    optimizer.zero_grad()
    (weight.sum() * (1 + rank.number)).backward()
    optimizer.clip_grad_norm_(1e6)
    later = weight.sum() * (10 + 10 * rank.number)
    if stage == STAGE_3:
        refusal = error_of(lambda: later.backward(retain_graph=True))
        assert "call step() or the optimizer's zero_grad() before backward()" in refusal
        assert "a backward pass after finish_grad_sync() was refused" in error_of(optimizer.step)
        assert weight.unique().tolist() == [0]
        optimizer.zero_grad()
    later.backward()
    optimizer.step()
    assert weight.unique().tolist() == [-15 if stage == STAGE_3 else -1.5 - 15]


SPOILT = [  # norm_type, whether the step is skipped, the value, and the parameter whose gradient it spoils
    (None, False, torch.inf, "scale"), (None, True, torch.nan, "scale"), (2.0, True, torch.nan, "tied.bias"),
    (2.0, False, torch.inf, "scale"), (1.0, False, torch.nan, "scale"),
    (torch.inf, False, torch.nan, "scale"), (torch.inf, False, torch.nan, "tied.bias")]


@on_ranks(spoilt=SPOILT)
def test_a_nan_or_inf_on_one_rank_is_what_torch_makes_of_it(rank, stage, spoilt):
    """Spoil a gradient of the last rank, in a shard of the first rank or of the last: a maximum may lose the one or
    the other. Norms and parameters are those of torch, nan for nan."""
    norm_type, skips, value, name = spoilt
    pair = Pair(rank, stage)
    bad = batch(1, rank.world_size - 1, device=rank.device)[0]

    def loss(model, x, y):
        spoils = torch.equal(x, bad)
        return loss_of(model, x, y) + (model.get_parameter(name).sum() * value if spoils else 0)

    for step in range(3):
        pair.backward(step, loss_of=loss)
        if norm_type:
            pair.clip(0.05, norm_type)
        for one in pair.optimizers:
            if not (skips and step == 1):
                one.step()
            one.zero_grad()
        pair.assert_same(not norm_type)
    n_bad = sum(param.isnan().sum().item() for param in pair.model.parameters())
    assert n_bad == 0 if skips else n_bad > 1


FORMS = {  # of a gradient that is assigned on rank r
    "expanded": lambda grad, r: grad.flatten()[:1].view([1] * grad.dim()).expand_as(grad),
    "transposed": lambda grad, r: grad.t().contiguous().t() if grad.dim() == 2 else grad,
    "sparse on rank 1": lambda grad, r: grad.to_sparse() if r == 1 else grad,
    "None on rank 1": lambda grad, r: None if r == 1 else grad,
    "in bfloat16": lambda grad, r: grad.bfloat16(),
}


@on_ranks(form=FORMS, before_there_is_an_optimizer=[False, True])
def test_gradients_assigned_by_hand_in_any_layout(rank, stage, form, before_there_is_an_optimizer):
    """Assign gradients to param.grad, the first ones also before the constructor: their means are stepped."""
    reference = Replicated(rank, **ADAMW)
    model = Net(seed=0).to(rank.device)
    params = trainable(model)

    def build():
        return optimizer_of(stage)(params, **UNUSED.get(stage, {}), **ADAMW)

    optimizer = None if before_there_is_an_optimizer else build()
    for step in range(2):
        generators = [torch.Generator().manual_seed(10 * step + r) for r in range(rank.world_size)]
        for param, expected in zip(params, trainable(reference.model)):
            grads = [FORMS[form](torch.randn(param.shape, generator=generator).to(rank.device), r)
                     for r, generator in enumerate(generators)]
            if form == "in bfloat16":
                param.grad = None
                param.grad_dtype = None
            param.grad = grads[rank.number]
            expected.grad = sum(grad.to_dense().to(expected) / rank.world_size for grad in grads if grad is not None)
        optimizer = optimizer or build()
        optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.step()
    assert_same(model, reference.model, sums_commute(rank))


@on_ranks(2, after=["backward", "averaging", "averaging and zero_grad"])
def test_gradients_assigned_after_others_count_or_are_an_error(rank, stage, after):
    """Assign b.grad, after backward on rank 1 only: stage 4 has sent off what was there. Else on both ranks."""
    a, b = parameter_of(0, rank), parameter_of(0, rank)
    optimizer = sgd_of(stage, [("a", a), ("b", b)])
    (a.sum() + b.sum()).backward()
    if after != "backward":
        optimizer.clip_grad_norm_(1e6)
    if after == "averaging and zero_grad":
        optimizer.zero_grad()
        a.grad = torch.ones_like(a)
    if after != "backward" or rank.number == 1:
        b.grad = torch.full_like(b, 2.0 if after == "averaging" else 1.0 + 2 * rank.number)
    if stage == STAGE_4 and after == "backward" or stage in (STAGE_3, STAGE_4) and after == "averaging":
        assert "gradient of parameter b was assigned after" in error_of(optimizer.step)
        assert a.eq(0).all() and b.eq(0).all()
        optimizer.zero_grad()
        with optimizer.no_sync():
            (a.sum() + b.sum()).backward()
        b.grad = torch.full_like(b, 1.0 + 2 * rank.number)
    optimizer.step()
    assert a.tolist() + b.tolist() == [-1.0] * 5 + [-2.0] * 5


BAD_GROUPS = {  # what is added -> words of the error
    "in more than one parameter group": lambda rank, weight: weight,
    "0 of group 1 .*rank 1": lambda rank, weight: weight.new_ones(2 + (rank.number == 1)).requires_grad_(),
    "only optimize Tensors": lambda rank, weight: "weight",
}


@pytest.mark.shared_guard
@on_ranks(2, words=BAD_GROUPS)
def test_a_bad_group_is_refused_on_every_rank_and_leaves_no_trace(rank, stage, words):
    weight = parameter_of(1, rank)
    optimizer = sgd_of(stage, [weight])
    group = {"params": [BAD_GROUPS[words](rank, weight)]}
    assert re.search(words, error_of(lambda: optimizer.add_param_group(group), TypeError, ValueError))
    weight.sum().backward()
    optimizer.step()
    assert weight.eq(0).all() and len(optimizer.param_groups) == 1


@on_ranks(2)
def test_an_optimizer_is_not_copied_but_its_model_is(rank, stage):
    """Copy the model while it has hooks and parameters are under way: the copy trains for itself."""
    pair = Pair(rank, stage, prefetch=stage == STAGE_4)
    pair.train(0)
    model, expected = pair.models
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = copy.deepcopy(expected)
    scheduler = torch.optim.lr_scheduler.StepLR(pair.optimizer, 1)
    for copy_it, thing in [(copy.copy, pair.optimizer), (pickle.dumps, pair.optimizer), (copy.deepcopy, scheduler)]:
        assert "use state_dict()" in error_of(functools.partial(copy_it, thing), TypeError)
    pair.train(1)
    for other in copies:
        assert_same(other, expected, exact=True)
        backward(other, rank, 1)
        assert all(param.grad is not None for param in trainable(other))  # no bucket of ours has taken it


PER_TENSOR = {"Muon": torch.optim.Muon, "Lamb": Lamb}


@pytest.mark.parametrize("stage", STAGES[:2])
@on_ranks(name=PER_TENSOR)
def test_optimizers_that_want_whole_tensors_are_right_in_stages_1_and_2(rank, stage, name):
    """Compare with torch, to the bit on two ranks. Muon computes in bfloat16: a last bit shows in the third place."""
    pair = Pair(rank, stage, PER_TENSOR[name], lambda model: [param for param in trainable(model) if param.dim() == 2],
                seeds=[0], lr=0.01)
    rtol = 0 if sums_commute(rank) else 1e-5
    atol = 0 if sums_commute(rank) else 2e-3 if name == "Muon" else 2e-6
    for step in range(4):
        pair.train(step)
        for model in pair.models:
            model.zero_grad()
        for param, expected in zip(*(model.parameters() for model in pair.models)):
            torch.testing.assert_close(param, expected, rtol=rtol, atol=atol)


def test_every_optimizer_of_torch_that_steps_tensor_by_tensor_is_accepted():
    with one_rank_of(2):
        for name in "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split():
            optimizer_of(STAGE_2)([torch.nn.Parameter(torch.ones(3))], getattr(torch.optim, name))
