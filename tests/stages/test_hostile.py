"""Hostile input: steps out of turn, gradients in odd forms, ranks that disagree, optimizers that can't be cut.

Each is what replicated training with plain torch makes of it, or the same error on every rank: one line that names the
parameter, before anything is changed, after which training can go on. What the constructor refuses is in test_contract.
"""

import copy
import pickle

import pytest
import torch

from harness import STAGE_2, STAGE_3, STAGE_4, STAGES
from tests.common import Net, batch, error_of, loss_of, on_ranks, one_rank_of, optimizer_of, trainable
from tests.pairs import ADAMW, Pair, Replicated, assert_same, backward, parameter_of, sgd_of, sums_commute

FINDS_UNUSED = {"find_unused_parameters": True}  # of stage 4


# b: backward, s: step, z: zero_grad, c: clip, +: add_param_group. A large letter is a call that stage 4 refuses, unless
# it looks for unused parameters. -> where the parameter arrives in stages 1 and 2, in stage 3, and in stage 4
SCRIPTS = {
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
    """Call methods in an odd order. Each backward pass adds a gradient of 1, and a step subtracts what there is.

    `step` keeps the gradients in stages 1 and 2, as torch does; in stage 3 it sets them to zero, in stage 4 to None.
    Stage 4 never adds a group between backward and step.
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


@on_ranks(2, was_frozen=[False, True])
def test_backward_after_gradients_are_averaged(rank, stage, was_frozen):
    """What is added to averaged gradients is averaged with them; stage 3, which has only a shard of them, refuses."""
    weight = parameter_of(0, rank, n=64).requires_grad_(not was_frozen)
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


@on_ranks(norm_and_value=[(None, torch.nan), (2.0, torch.inf), (torch.inf, torch.nan)], name=["scale", "tied.bias"])
def test_a_nan_or_inf_on_one_rank_is_what_torch_makes_of_it(rank, stage, norm_and_value, name):
    """Spoil a gradient of the last rank in the second step, in a shard of the first rank or of the last: a maximum may
    lose the one or the other. Norms and parameters are those of torch, nan for nan. Without a norm the spoilt step is
    left out, and leaves no nan."""
    norm_type, value = norm_and_value
    spoilt_batch, _ = batch(1, rank.world_size - 1, device=rank.device)
    pair = Pair(rank, stage)

    def spoilt_loss(model, x, y):
        loss = loss_of(model, x, y)
        if torch.equal(x, spoilt_batch):
            loss = loss + model.get_parameter(name).sum() * value
        return loss

    for step in range(3):
        pair.backward(step, loss_of=spoilt_loss)
        if norm_type is not None:
            pair.clip(0.05, norm_type)
        for optimizer in pair.optimizers:
            if norm_type is not None or step != 1:
                optimizer.step()
            optimizer.zero_grad()
        pair.assert_same(norm_type is None)
    n_bad = sum(param.isnan().sum().item() for param in pair.model.parameters())
    assert n_bad == 0 if norm_type is None else n_bad > 1


FORMS = {  # of a gradient that is assigned on a rank
    "expanded": lambda grad, rank: grad.flatten()[:1].view([1] * grad.dim()).expand_as(grad),
    "transposed": lambda grad, rank: grad.t().contiguous().t() if grad.dim() == 2 else grad,
    "sparse on rank 1": lambda grad, rank: grad.to_sparse() if rank == 1 else grad,
    "None on rank 1": lambda grad, rank: None if rank == 1 else grad,
    "in bfloat16": lambda grad, rank: grad.bfloat16(),
}


@on_ranks(form=FORMS, before_there_is_an_optimizer=[False, True])
def test_gradients_assigned_by_hand_in_any_layout(rank, stage, form, before_there_is_an_optimizer):
    """Assign gradients to param.grad, the first ones also before the constructor: their means are stepped."""
    reference = Replicated(rank, **ADAMW)
    model = Net(seed=0).to(rank.device)
    own_arguments = FINDS_UNUSED if stage == STAGE_4 else {}

    def build():
        return optimizer_of(stage)(trainable(model), **own_arguments, **ADAMW)

    optimizer = None if before_there_is_an_optimizer else build()
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    for _ in range(2):
        for param, expected in zip(trainable(model), trainable(reference.model)):
            grads = []  # of each rank
            for number in range(rank.world_size):
                grad = torch.randn(param.shape, generator=generator).to(rank.device)
                grads.append(FORMS[form](grad, number))
            if form == "in bfloat16":
                param.grad = None
                param.grad_dtype = None  # lets a gradient have another dtype
            param.grad = grads[rank.number]
            expected.grad = sum(grad.to_dense().to(expected) / rank.world_size for grad in grads if grad is not None)
        optimizer = optimizer or build()
        optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.step()
    assert_same(model, reference.model, sums_commute(rank))


@on_ranks(2, after=["backward", "averaging"])
def test_gradients_assigned_after_others_count_or_are_an_error(rank, stage, after):
    """Assign b.grad. After backward only rank 1 does so: stage 4 has sent what was there. Else both ranks do so."""
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
        optimizer.zero_grad()
        with optimizer.no_sync():
            (a.sum() + b.sum()).backward()
        b.grad = torch.full_like(b, 2.0)
    optimizer.step()
    assert a.eq(-1).all() and b.eq(-2).all()


@pytest.mark.shared_guard
@on_ranks(2)
def test_a_bad_group_is_refused_on_every_rank_and_leaves_no_trace(rank, stage):
    """Add a parameter of another shape on rank 1. The constructor refuses more: test_contract.py."""
    weight = parameter_of(1, rank)
    optimizer = sgd_of(stage, [weight])
    group = {"params": [parameter_of(1, rank, n=2 + rank.number)]}
    error = error_of(lambda: optimizer.add_param_group(group), ValueError)
    assert "0 of group 1 (2,) torch.float32 on rank 0 and 0 of group 1 (3,) torch.float32 on rank 1" in error
    weight.sum().backward()
    optimizer.step()
    assert weight.eq(0).all() and len(optimizer.param_groups) == 1


@on_ranks(2)
def test_an_optimizer_is_not_copied_but_its_model_is(rank, stage):
    """Copy the model while it has hooks and parameters are under way: the copy trains for itself."""
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
        assert all(param.grad is not None for param in trainable(model_copy))  # the optimizer has taken no gradient


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
