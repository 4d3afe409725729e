"""Hostile input: steps out of turn, gradients in odd forms, ranks that disagree, optimizers that can't be cut.

A stage does what plain torch does, or raises the same error on every rank. The error is one line that names the
parameter. Nothing has changed by then, and training can go on. What the constructor refuses is in test_contract.py.
"""

import copy
import pickle

import pytest
import torch

from harness import STAGE_2, STAGE_3, STAGE_4, STAGES
from tests.common import error_of, on_ranks, one_rank_of, optimizer_of, trainable
from tests.pairs import Pair, assert_same, backward, parameter_of, sgd_of

FINDS_UNUSED = {"find_unused_parameters": True}  # of stage 4


# A letter is a call. b: backward, s: step, z: zero_grad, c: clip, +: add_param_group. Stage 4 refuses the call of a
# large letter, unless the optimizer looks for unused parameters.
SCRIPTS = {  # -> value of the parameter in the end, in stages 1 and 2, in stage 3, and in stage 4
    "S bs": (-1, -1, -1),
    "bsS bs": (-4, -2, -2),
    "bzS zzbs": (-1, -1, -1),
    "bbs bsz": (-5, -3, -3),
    "CS bs": (-1, -1, -1),
    "b+sz bs": (-2, -2, -2),
    "bc+sz bs": (-2, -2, -2),
}
REFUSALS = {"+": "add_param_group() between backward() and step()",
            **dict.fromkeys("SC", "no gradient on some rank for parameter 0 of group 0")}


@pytest.mark.parametrize("stage, finds_unused", [*((stage, False) for stage in STAGES), (STAGE_4, True)])
@on_ranks(script=SCRIPTS)
def test_steps_out_of_turn_are_those_of_torch(rank, stage, finds_unused, script):
    """Call methods in an odd order. Each backward pass adds a gradient of 1, and a step subtracts the gradient.

    `step` keeps the gradients in stages 1 and 2, as torch does. In stage 3 `step` sets gradients to zero, in stage 4 to
    None. Stage 4 always refuses to add a group between backward and step.
    """
    weight = parameter_of(0, rank)
    added = parameter_of(0, rank)
    optimizer = sgd_of(stage, [weight], **FINDS_UNUSED if finds_unused else {})
    calls = {
        "b": lambda: (weight.sum() + added.sum()).backward(),
        "s": optimizer.step,
        "z": optimizer.zero_grad,
        "c": lambda: optimizer.clip_grad_norm_(100.0),
        "+": lambda: optimizer.add_param_group({"params": [added]}),
    }
    for letter in script.replace(" ", ""):
        call = calls[letter.lower()]
        is_refused = letter == "+" or letter.isupper() and not finds_unused
        if stage == STAGE_4 and is_refused:
            before = weight.tolist()
            assert REFUSALS[letter] in error_of(call)
            assert weight.tolist() == before
        else:
            call()
    of_stages_1_and_2, of_stage_3, of_stage_4 = SCRIPTS[script]
    expected = {STAGE_3: of_stage_3, STAGE_4: of_stage_4}.get(stage, of_stages_1_and_2)
    assert weight.unique().tolist() == [expected]


@on_ranks(2)
def test_backward_after_gradients_are_averaged(rank, stage):
    """Stages 1, 2 and 4 average the later gradient and add it. Stage 3 has a shard of the first average, and refuses.

    The parameter is frozen while the constructor registers hooks.
    """
    weight = parameter_of(0, rank, n=64).requires_grad_(False)
    optimizer = sgd_of(stage, [weight])
    weight.requires_grad_(True)
    optimizer.zero_grad()
    (weight.sum() * (1 + rank.number)).backward()  # the mean of two ranks is 1.5
    optimizer.clip_grad_norm_(1e6)
    later = weight.sum() * (10 + 10 * rank.number)  # the mean is 15
    if stage == STAGE_3:
        refusal = error_of(lambda: later.backward(retain_graph=True))
        assert "call step() or the optimizer's zero_grad() before backward()" in refusal
        assert "a backward pass after finish_grad_sync() was refused" in error_of(optimizer.step)
        assert weight.unique().tolist() == [0]
        optimizer.zero_grad()
    later.backward()
    optimizer.step()
    assert weight.unique().tolist() == [-15 if stage == STAGE_3 else -1.5 - 15]


@on_ranks(norm_type=[2.0, torch.inf], spoilt=[0, 1])
def test_a_nan_on_one_rank_makes_the_norm_nan_on_every_rank(rank, stage, norm_type, spoilt):
    """Spoil one of two gradients on the last rank. As in torch, the norm is nan, and a step makes all parameters nan.

    The shard with the nan is on the first rank or on the last rank, because a maximum over the ranks may lose a nan.
    """
    params = [parameter_of(0, rank, n=64), parameter_of(0, rank, n=64)]
    optimizer = sgd_of(stage, params)
    for param in params:
        param.grad = torch.ones_like(param)
    if rank.number == rank.world_size - 1:
        params[spoilt].grad[7] = torch.nan
    assert optimizer.clip_grad_norm_(1.0, norm_type).isnan()
    optimizer.step()
    assert all(param.isnan().all() for param in params)


FORMS = {  # of a gradient that is assigned on rank 1
    "expanded": lambda grad: grad[:1, :1].expand_as(grad),
    "transposed": lambda grad: grad.t().contiguous().t(),
    "sparse": lambda grad: grad.to_sparse(),
    "None": lambda grad: None,
    "in bfloat16": lambda grad: grad.bfloat16(),
}


@on_ranks(form=FORMS, before_there_is_an_optimizer=[False, True])
def test_gradients_assigned_by_hand_in_any_layout(rank, stage, form, before_there_is_an_optimizer):
    """Assign gradients to param.grad, before the constructor or after it: a step subtracts their mean."""
    numbers = torch.arange(24.0, device=rank.device).view(4, 6)
    grads = []  # of each rank
    for number in range(rank.world_size):
        grad = numbers * (number + 1)
        grads.append(FORMS[form](grad) if number == 1 else grad)
    mean = sum(grad.to_dense().float() for grad in grads if grad is not None) / rank.world_size
    weight = torch.nn.Parameter(torch.zeros_like(numbers))
    weight.grad_dtype = None  # lets a gradient have another dtype
    if before_there_is_an_optimizer:
        weight.grad = grads[rank.number]
    optimizer = sgd_of(stage, [weight], **FINDS_UNUSED if stage == STAGE_4 else {})
    if not before_there_is_an_optimizer:
        weight.grad = grads[rank.number]
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -mean)


@on_ranks(2, after=["backward", "averaging"])
def test_gradients_assigned_after_others_count_or_are_an_error(rank, stage, after):
    """Assign b.grad on rank 1 after backward, or on both ranks after gradients were averaged. The mean of b.grad is 2.

    It is too late for stage 4, which has sent the gradient of backward, and for stage 3 after averaging. test_stages.py
    has gradients that are assigned in time.
    """
    a = parameter_of(0, rank)
    b = parameter_of(0, rank)
    optimizer = sgd_of(stage, [("a", a), ("b", b)])
    (a.sum() + b.sum()).backward()  # rank 0's b.grad is 1
    if after == "averaging":
        optimizer.clip_grad_norm_(1e6)
        b.grad = torch.full_like(b, 2.0)
    elif rank.number == 1:
        b.grad = torch.full_like(b, 3.0)
    if stage == STAGE_4 or stage == STAGE_3 and after == "averaging":
        assert "gradient of parameter b was assigned after" in error_of(optimizer.step)
        assert a.eq(0).all() and b.eq(0).all()
    else:
        optimizer.step()
        assert a.eq(-1).all() and b.eq(-2).all()


@on_ranks(2)
def test_an_optimizer_is_not_copied_but_its_model_is(rank, stage):
    """Copy the model while it has hooks and parameters are under way: a copy keeps its values and its gradients."""
    pair = Pair(rank, stage, prefetch=stage == STAGE_4)
    pair.train(0)
    model, reference = pair.models
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = copy.deepcopy(reference)
    scheduler = torch.optim.lr_scheduler.StepLR(pair.optimizer, 1)
    assert "use state_dict()" in error_of(lambda: pickle.dumps(pair.optimizer), TypeError)
    assert "use state_dict()" in error_of(lambda: copy.deepcopy(scheduler), TypeError)
    pair.train(1)
    for model_copy in copies:
        assert_same(model_copy, expected, exact=True)
        backward(model_copy, rank, 1)
        assert all(param.grad is not None for param in trainable(model_copy))


def matrices(model):
    return [param for param in trainable(model) if param.dim() == 2]


@pytest.mark.parametrize("stage", STAGES[:2])
@on_ranks(2)
def test_optimizers_that_want_whole_tensors_are_right_in_stages_1_and_2(rank, stage):
    pair = Pair(rank, stage, torch.optim.Muon, matrices, seeds=[0], lr=0.01)
    pair.train(0, 1, 2, 3)
    pair.assert_same()


def test_every_optimizer_of_torch_that_steps_tensor_by_tensor_is_accepted():
    with one_rank_of(2):
        for name in "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split():
            optimizer_of(STAGE_2)([torch.nn.Parameter(torch.ones(3))], getattr(torch.optim, name))
