"""save, load and latest: to and from torch's own programs, and with experts."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import checkpoint
from guard.chained import Chained
from tests.checkpoint import ONE, a_run, train, wrapped
from tests.checkpoint.compare import equal, full, said_by_all, weights
from tests.common import STAGES, error_of, on_ranks


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))


@on_ranks(2, 3, layout=["FSDP2", "flattened", "torchtitan"])
def test_an_fsdp2_run_goes_on_in_stage_4_to_the_bit(rank, layout, tmp_path):
    """torchtitan keeps the model at the top, and hyperparameters by parameter. FSDP2's way back: test_torch.py."""
    model = fully_shard(net(0), mesh=init_device_mesh("cpu", (rank.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(rank, model, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=layout != "FSDP2")
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    state = of_model if layout == "torchtitan" else {"model": of_model}
    dcp.save({**state, "optimizer": of_optimizer}, checkpoint_id=tmp_path / layout)
    its_model = net(1)
    its = its_model, wrapped(STAGES[3], its_model.parameters(), lr=9.0)
    assert checkpoint.load(tmp_path / layout, *its) is None and its[1].param_groups[0]["lr"] == 0.01
    for run in ((model, optimizer), its):
        train(rank, *run, range(3, 6))
    for param, expected in zip(its_model.parameters(), model.parameters()):
        assert torch.allclose(param, expected.full_tensor(), rtol=0, atol=0 if rank.world_size == 2 else 1e-6)
    shallow = net(0)[:2]
    its = shallow, wrapped(STAGES[3], shallow.parameters())
    line = said_by_all(error_of(lambda: checkpoint.load(tmp_path / layout, *its), checkpoint.ForeignCheckpoint))
    assert "which this model and optimizer don't have" in line


@on_ranks(2, stage=STAGES)
def test_torchs_converters_make_one_file_and_back(rank, stage, tmp_path):
    """Names, shapes and values as in plain torch, and no padding."""
    model, optimizer = a_run(rank, stage, steps=2)
    checkpoint.save(tmp_path / stage, model, optimizer, {"rank": rank.number, "past": (torch.arange(20.0), [1])})
    expected = full(optimizer)
    names = [name for name, _ in model.named_parameters()]
    if rank.number == 0:
        dcp_to_torch_save(tmp_path / stage, tmp_path / "one.pt")
        found = torch.load(tmp_path / "one.pt", weights_only=True)
        assert equal(found["model"], dict(model.state_dict()))
        assert equal(found["extra"], {str(n): {"rank": n, "past": (torch.arange(20.0), [1])} for n in range(2)})
        assert equal(found["optimizer"]["state"], {names[index]: its for index, its in expected["state"].items()})
        assert found["optimizer"]["param_groups"] == [{**expected["param_groups"][0], "params": names}]
        torch.save({name: found[name] for name in ("model", "optimizer")}, tmp_path / "one.pt")
        torch_save_to_dcp(tmp_path / "one.pt", tmp_path / f"{stage} again")
    dist.barrier()
    again = a_run(rank, stage, seed=1)
    assert checkpoint.load(tmp_path / f"{stage} again", *again) is None
    assert equal([weights(again[0]), full(again[1])], [weights(model), expected])


def test_a_program_without_process_groups_saves_a_fresh_optimizer_and_leaves_it_fresh(tmp_path):
    model, optimizer = a_run(ONE, None)
    checkpoint.save(tmp_path / "fresh", model, optimizer, 1, asynchronous=True).result()
    assert not optimizer.state and checkpoint.load(tmp_path / "fresh", model, optimizer) == 1


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    def complete(*names):
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / ".metadata").touch()

    assert checkpoint.latest(tmp_path / "nowhere") is None and checkpoint.latest(tmp_path) is None
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-5" / ".metadata").mkdir(parents=True)
    complete("step-2", "step-1", "step-4.0123abcd.partial", "zzz-best")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    for name in ("step-9", "step-10", "step-00000011", "epoch-12"):
        complete(name)
        assert checkpoint.latest(tmp_path) == tmp_path / name


# ------------------------------------------------------------------------------------------------------------- experts


def with_experts(numbers, group, seed=0):
    """Return a model with a dense layer and the experts of some `numbers` in `group`, and the Chained of both."""
    torch.manual_seed(seed)
    names = [f"expert{number}" for number in numbers]
    model = nn.ModuleDict({"dense": nn.Linear(4, 4), **{name: nn.Linear(4, 4) for name in names}})
    experts = [param for name in names for param in model[name].parameters()]
    if seed == 0:
        for name in names:  # each expert has its own values, the same on its ranks
            for param in model[name].parameters():
                param.data.fill_(float(name[-1]) + 1)
    optimizer = Chained(wrapped(STAGES[3], model["dense"].parameters(), lr=0.1),
                        wrapped(STAGES[3], experts, lr=0.1, process_group=group))
    for step in range(2 if seed == 0 else 0):
        sum((step + 1) * model[name](torch.ones(2, 4)).square().mean() for name in model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@on_ranks(4)
def test_experts_of_smaller_process_groups_are_saved_together_by_their_global_names(rank, tmp_path):
    """EP 2 -> EP 4 -> EP 2. Equal names of unlike experts are refused: DCP would keep one rank's, in silence.
    """
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    singles = [dist.new_group([number]) for number in range(4)]
    half = rank.number // 2
    of_half = [2 * half, 2 * half + 1]
    model, optimizer = with_experts(of_half, pairs[half])
    checkpoint.save(tmp_path / "ep2", model, optimizer, {"rank": rank.number})
    one_each = with_experts([rank.number], singles[rank.number], seed=1)
    assert checkpoint.load(tmp_path / "ep2", *one_each) == {"rank": rank.number}
    checkpoint.save(tmp_path / "ep4", *one_each)
    again = with_experts(of_half, pairs[half], seed=2)
    checkpoint.load(tmp_path / "ep4", *again)
    assert equal(weights(again[0]), weights(model))
    for one, other in zip(optimizer.optimizers, again[1].optimizers):
        assert equal(full(one), full(other))
    same_names = with_experts([0], pairs[half])
    line = said_by_all(error_of(lambda: checkpoint.save(tmp_path / "never", *same_names), checkpoint.UnfitModel))
    assert "each expert needs a name of its own" in line and not (tmp_path / "never").exists()
    lacks_one = with_experts([0], None)
    with pytest.raises(checkpoint.ForeignCheckpoint, match="it has .*expert.*, which this model and optimizer don't"):
        checkpoint.load(tmp_path / "ep2", *lacks_one)
