"""Hostile input: steps out of turn, gradients in odd forms, ranks that disagree, optimizers that can't be cut.

Each is what replicated training with plain torch makes of it, or the same error on every rank: one line that names the
parameter, before anything is changed, after which training can go on. What the constructor refuses is in test_contract.
"""

import copy
import io
import pickle
import re

import pytest
import torch

from harness import FOUR, STAGES, THREE, TWO
from tests.common import Net, batch, error_of, loss_of, on_ranks, one_rank_of, optimizer_of, trainable
from tests.pairs import ADAMW, SGD, UNFUSED, Pair, Replicated, assert_same, backward, exact, parameter_of, sgd_of
from tests.stages.test_contract import Lamb

UNUSED = {FOUR: {"find_unused_parameters": True}}


SCRIPTS = {  # b: backward, s: step, z: zero_grad, c: clip, +: add_param_group; and what stage 4 refuses
    "step first of all": ("s bsz", "s"),
    "step twice": ("bss bsz", "s"),
    "step twice after zero_grad": ("bszs bsz", "s"),
    "zero_grad before step": ("bzs bsz", "s"),
    "zero_grad twice": ("zzbszz bsz", ""),
    "never zero_grad": ("bsbsbs", ""),
    "backward twice": ("bbsz bsz", ""),
    "clip twice": ("bccsz bsz", ""),
    "clip, and forget": ("bczbsz", ""),
    "clip without backward": ("cs bsz", "cs"),
    "a group after backward": ("b+sz bsz", "+"),
    "a group after clipping": ("bc+sz bsz", "+"),
}
REFUSALS = {"c": "no gradient on some rank for parameter 0 of group 0, .*: call backward",
            "s": "no gradient on some rank for parameter 0 of group 0, .*: call backward",
            "+": r"add_param_group\(\) between backward\(\) and step\(\)"}


@pytest.mark.parametrize("stage, finds_unused", [*((stage, False) for stage in STAGES), (FOUR, True)])
@on_ranks(script=SCRIPTS)
def test_steps_out_of_turn_are_those_of_torch(rank, stage, finds_unused, script):
    """`step` keeps the gradients in stages 1 and 2, as torch does; in stage 3 it sets them to zero, in stage 4 to None.

    Stage 4 refuses a step without any gradient, unless it looks for unused parameters, and a group between backward and
    step. In stages 1 and 2 nothing is stepped then, in stage 3 the gradient is zero.
    """
    letters, refused_by_4 = SCRIPTS[script]

    def first(model):
        return [*model.up.parameters(), *model.down.parameters()] if "+" in letters else trainable(model)

    def second(model):
        return {"params": [model.scale, model.head.weight, *model.embed.parameters()], "lr": 0.02}

    pair = Pair(rank, stage, torch.optim.SGD, first, seeds=[0], own=UNUSED[FOUR] if finds_unused else {}, **SGD,
                weight_decay=0.1, **UNFUSED)  # None, zero and twice as much all differ
    (model, same), (optimizer, plain) = pair.models, pair.optimizers

    def stepped():
        return [param for group in plain.param_groups for param in group["params"]]

    def forget():
        plain.zero_grad()
        if stage == THREE:
            for param in stepped():
                param.grad = torch.zeros_like(param)

    def step_as_documented():
        plain.step()
        if stage in (THREE, FOUR):
            forget()

    calls = {  # letter -> what ours does, and what is expected of it
        "b": (lambda: backward(model, rank, len(done)), lambda: pair.replicated.backward(len(done))),
        "s": (optimizer.step, step_as_documented),
        "z": (optimizer.zero_grad, forget),
        "c": (lambda: optimizer.clip_grad_norm_(0.05), lambda: torch.nn.utils.clip_grad_norm_(stepped(), 0.05)),
        "+": (lambda: optimizer.add_param_group(second(model)), lambda: plain.add_param_group(second(same))),
    }
    done = refused = ""
    forget()
    for letter in letters.replace(" ", ""):
        before = [param.detach().clone() for param in model.parameters()]
        try:
            norm = calls[letter][0]()
        except RuntimeError as error:
            refused += letter
            assert re.match(REFUSALS[letter], str(error))
            assert all(map(torch.equal, model.parameters(), before))
        else:
            expected = calls[letter][1]()
            assert letter != "c" or torch.allclose(norm, expected, rtol=1e-5), (norm, expected)
        assert_same(model, same, exact=False)
        done += letter
    assert refused == (refused_by_4 if stage == FOUR and not (finds_unused and "+" not in letters) else "")


@on_ranks(2, was_frozen=[False, True])
def test_backward_after_gradients_are_averaged(rank, stage, was_frozen):
    """What is added to averaged gradients is averaged with them; stage 3, which has only a shard of them, refuses."""
    weight = parameter_of(0, rank, n=64).requires_grad_(not was_frozen)
    optimizer = sgd_of(stage, [weight])
    weight.requires_grad_(True)
    optimizer.zero_grad()
    (weight.sum() * (1 + rank.rank)).backward()
    optimizer.clip_grad_norm_(1e6)
    later = weight.sum() * (10 + 10 * rank.rank)
    if stage == THREE:
        refusal = error_of(lambda: later.backward(retain_graph=True))
        assert "call step() or the optimizer's zero_grad() before backward()" in refusal
        assert "a backward pass after finish_grad_sync() was refused" in error_of(optimizer.step)
        assert weight.unique().tolist() == [0]
        optimizer.zero_grad()
    later.backward()
    optimizer.step()
    assert weight.unique().tolist() == [-15 if stage == THREE else -1.5 - 15]


NORMS = [(None, False), (None, True), (2.0, True), (2.0, False), (1.0, False), (torch.inf, False)]


@on_ranks(norm_and_skip=NORMS, value_and_where=[(torch.nan, "scale"), (torch.nan, "tied.bias"), (torch.inf, "scale")])
def test_a_nan_or_inf_on_one_rank_is_what_torch_makes_of_it(rank, stage, norm_and_skip, value_and_where):
    """In a shard of the first rank, or of the last: a maximum may lose the one or the other."""
    (norm_type, skip), (value, where), pair = norm_and_skip, value_and_where, Pair(rank, stage)
    bad = batch(1, rank.world_size - 1, device=rank.device)[0]  # of the last rank

    def loss(model, x, y):
        return loss_of(model, x, y) + (model.get_parameter(where).sum() * value if torch.equal(x, bad) else 0)

    for step in range(3):
        pair.backward(step, loss_of=loss)
        if norm_type:
            pair.clip(0.05, norm_type)
        for one in pair.optimizers:
            if not (skip and step == 1):
                one.step()
            one.zero_grad()
        pair.assert_same(not norm_type)
    n_bad = sum(param.isnan().sum().item() for param in pair.model.parameters())
    assert n_bad == 0 if skip else n_bad > 1


FORMS = {  # of a gradient that is assigned on rank r
    "as they are": lambda grad, r: grad,
    "expanded": lambda grad, r: grad.flatten()[:1].view([1] * grad.dim()).expand_as(grad),
    "transposed": lambda grad, r: grad.t().contiguous().t() if grad.dim() == 2 else grad,
    "strided": lambda grad, r: torch.stack([grad, grad + 7], dim=-1)[..., 0],
    "sparse": lambda grad, r: grad.to_sparse(),
    "sparse on rank 1": lambda grad, r: grad.to_sparse() if r == 1 else grad,
    "None on rank 1": lambda grad, r: None if r == 1 else grad,
    "in bfloat16": lambda grad, r: grad.bfloat16(),
}


@on_ranks(form=FORMS, before_there_is_an_optimizer=[False, True])
def test_gradients_assigned_by_hand_in_any_layout(rank, stage, form, before_there_is_an_optimizer):
    reference, model = Replicated(rank, **ADAMW), Net(seed=0).to(rank.device)
    params, optimizer = trainable(model), None
    for step in range(2):
        if optimizer is None and not before_there_is_an_optimizer:
            optimizer = optimizer_of(stage)(params, **UNUSED.get(stage, {}), **ADAMW)
        generators = [torch.Generator().manual_seed(10 * step + r) for r in range(rank.world_size)]
        for param, expected in zip(params, trainable(reference.model)):
            grads = [FORMS[form](torch.randn(param.shape, generator=generator).to(rank.device), r)
                     for r, generator in enumerate(generators)]
            if form == "in bfloat16":
                param.grad, param.grad_dtype = None, None
            param.grad = grads[rank.rank]
            present = [grad.to_dense().to(expected) / rank.world_size for grad in grads if grad is not None]
            expected.grad = sum(present).contiguous()
        optimizer = optimizer or optimizer_of(stage)(params, **UNUSED.get(stage, {}), **ADAMW)
        optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.step()
    assert_same(model, reference.model, exact(rank))


@on_ranks(2, after=["backward", "averaging", "averaging and zero_grad", "a step that an inf on rank 1 made all skip"])
def test_gradients_assigned_after_others_count_or_are_an_error(rank, stage, after):
    """After backward on rank 1 only: stage 4 has sent off what was there. Else on both ranks."""
    a, b = parameter_of(0, rank), parameter_of(0, rank)
    optimizer, scaler = sgd_of(stage, [("a", a), ("b", b)]), torch.amp.GradScaler(rank.device.type)
    if "inf" in after:
        scaler.scale((a.sum() + b.sum()) * (torch.inf if rank.rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        (a.sum() + b.sum()).backward()
    if "averaging" in after:
        optimizer.clip_grad_norm_(1e6)
    if "zero_grad" in after:
        optimizer.zero_grad()
    if "zero_grad" in after or "inf" in after:
        a.grad = torch.ones_like(a)
    if after != "backward" or rank.rank == 1:
        b.grad = torch.full_like(b, 2.0 if after == "averaging" else 1.0 + 2 * rank.rank)
    if stage == FOUR and after == "backward" or stage in (THREE, FOUR) and after == "averaging":
        assert "gradient of parameter b was assigned after" in error_of(optimizer.step)
        assert a.eq(0).all() and b.eq(0).all()
        optimizer.zero_grad()
        with optimizer.no_sync():
            (a.sum() + b.sum()).backward()
        b.grad = torch.full_like(b, 1.0 + 2 * rank.rank)
    optimizer.step()
    assert a.tolist() + b.tolist() == [-1.0] * 5 + [-2.0] * 5


@pytest.mark.parametrize("stage", STAGES[:2])
@on_ranks(2)
def test_channels_last_and_other_layouts(rank, stage):
    """torch's fused kernels for the CPU don't look at strides: the gradient must have those of the parameter.

    What is transposed or has gaps can't be broadcast: NCCL refuses the one, a broadcast would fill the others.
    """
    values = torch.arange(48.0, device=rank.device).view(2, 3, 4, 2)
    weight = torch.nn.Parameter(values.clone(memory_format=torch.channels_last))
    plain = torch.nn.Parameter(values.clone())
    kwargs = {"lr": 0.1, "fused": True}
    optimizer, reference = optimizer_of(stage)([weight], **kwargs), torch.optim.AdamW([plain], **kwargs)
    for step in range(2):
        weight.grad, plain.grad = (values - step for _ in range(2))
        optimizer.step()
        reference.step()
        assert torch.allclose(weight, plain, rtol=1e-6), (weight, plain)
    for other in (values[0, 0].t(), values[0, 0, :, :1], values.transpose(2, 3), values[..., :1, :]):
        named = [("other", torch.nn.Parameter(other))]
        assert "parameter other is not contiguous" in error_of(lambda: optimizer_of(stage)(named), ValueError)


BAD_GROUPS = {
    "duplicate": lambda rank, weight: weight,
    "another shape": lambda rank, weight: weight.new_ones(2 + (rank.rank == 1)).requires_grad_(),
    "sparse on rank 1": lambda rank, weight: weight.new_ones(2).to_sparse() if rank.rank else weight.new_ones(2),
    "no tensor": lambda rank, weight: "weight",
}


@pytest.mark.shared_guard
@on_ranks(2, bad=BAD_GROUPS)
def test_a_bad_group_is_refused_on_every_rank_and_leaves_no_trace(rank, stage, bad):
    weight = parameter_of(1, rank)
    optimizer, group = sgd_of(stage, [weight]), {"params": [BAD_GROUPS[bad](rank, weight)]}
    words = "0 of group 1|in more than one parameter group|only optimize Tensors"
    assert re.search(words, error_of(lambda: optimizer.add_param_group(group), TypeError, ValueError))
    weight.sum().backward()
    optimizer.step()
    assert weight.eq(0).all() and len(optimizer.param_groups) == 1


@on_ranks(2)
def test_an_optimizer_is_not_copied_but_its_model_is(rank, stage):
    """Whatever hooks the model has, and while parameters are under way."""
    pair = Pair(rank, stage, prefetch=stage == FOUR)
    pair.train(0)
    (model, expected), optimizer = pair.models, pair.optimizer
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = copy.deepcopy(expected)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for way, what in [(copy.copy, optimizer), (copy.deepcopy, optimizer), (pickle.dumps, optimizer),
                      (copy.deepcopy, scheduler), (lambda one: torch.save(one, io.BytesIO()), optimizer)]:
        assert "use state_dict()" in error_of(lambda way=way, what=what: way(what), TypeError)
    pair.train(1)  # the copies stay as they are
    for other in again:
        assert_same(other, expected, exact=True)
        backward(other, rank, 1)
        assert all(param.grad is not None for param in trainable(other))  # no bucket of ours has taken it


PER_TENSOR = {"Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon, "Lamb": Lamb}


@pytest.mark.parametrize("stage", STAGES[:2])
@on_ranks(name=PER_TENSOR)
def test_optimizers_that_want_whole_tensors_are_right_in_stages_1_and_2(rank, stage, name):
    pair = Pair(rank, stage, PER_TENSOR[name], lambda model: [param for param in trainable(model) if param.dim() == 2],
                seeds=[0], lr=0.01)
    # Muon computes in bfloat16: what differs in a float's last place may differ in its third.
    tolerance = 0 if exact(rank) else 2e-3 if name == "Muon" else 2e-6
    for step in range(4):
        pair.train(step)
        for model in pair.models:
            model.zero_grad()
        for param, expected in zip(*(model.parameters() for model in pair.models)):
            torch.testing.assert_close(param, expected, rtol=0 if exact(rank) else 1e-5, atol=tolerance)


def test_every_optimizer_of_torch_that_steps_tensor_by_tensor_is_accepted():
    with one_rank_of(2):
        for name in "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split():
            optimizer_of(TWO)([torch.nn.Parameter(torch.ones(3))], getattr(torch.optim, name))
