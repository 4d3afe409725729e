"""save and load: to and from torch's own programs, with experts, and what a load needs."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import checkpoint
from guard.chained import Chained
from tests.checkpoint import ONE, a_run, train, wrapped
from tests.checkpoint.compare import equal, full, said_by_all, weights
from tests.common import STAGES, Net, error_of, on_ranks
from tests.ranks import run_module


def fsdp2_run(rank, seed, steps=()):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(rank, model, optimizer, steps, alike=False)
    return model, optimizer


def stage_4_run(seed, **kwargs):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
    return model, wrapped(STAGES[3], model.parameters(), **kwargs)


def wholes(model):
    return [getattr(param, "full_tensor", lambda param=param: param)().detach() for param in model.parameters()]


@on_ranks(2, layout=["FSDP2", "torchtitan"])
def test_an_fsdp2_run_goes_on_in_stage_4_and_back_to_the_bit(rank, layout, tmp_path):
    """As docs/checkpoints.md has it. torchtitan keeps the model at the top, and hyperparameters by parameter."""
    model, optimizer = fsdp2_run(rank, 0, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "torchtitan")
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    state = of_model if layout == "torchtitan" else {"model": of_model}
    dcp.save({**state, "optimizer": of_optimizer}, checkpoint_id=tmp_path / layout)
    ours = stage_4_run(1, lr=9.0)
    assert checkpoint.load(tmp_path / layout, *ours) is None and ours[1].param_groups[0]["lr"] == 0.01
    if layout == "torchtitan":
        deeper = nn.Sequential(nn.Linear(7, 5), nn.Tanh())
        its = deeper, wrapped(STAGES[3], deeper.parameters())
        line = said_by_all(error_of(lambda: checkpoint.load(tmp_path / layout, *its), checkpoint.ForeignCheckpoint))
        assert "which this model and optimizer don't have" in line
    for run in ((model, optimizer), ours):
        train(rank, *run, range(3, 6), alike=False)
    assert equal(wholes(model), wholes(ours[0]))
    checkpoint.save(tmp_path / f"{layout} again", *ours)
    model, optimizer = fsdp2_run(rank, 2)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=tmp_path / f"{layout} again")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for run in ((model, optimizer), ours):
        train(rank, *run, range(6, 9), alike=False)
    assert equal(wholes(model), wholes(ours[0])) and optimizer.param_groups[0]["lr"] == 0.01


@on_ranks(2, stage=STAGES)
def test_torchs_own_converter_makes_one_file_and_plain_torch_goes_on(rank, stage, tmp_path):
    """Names, shapes and values, and no padding; and back from such a file."""
    model, optimizer = a_run(rank, stage, steps=2)
    checkpoint.save(tmp_path / stage, model, optimizer, {"rank": rank.rank, "past": (torch.arange(20.0), [1])})
    expected, names = full(optimizer), [name for name, _ in model.named_parameters()]
    if rank.rank:
        return
    dcp_to_torch_save(tmp_path / stage, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert equal(found["model"], dict(model.state_dict()))
    assert equal(found["extra"], {str(n): {"rank": n, "past": (torch.arange(20.0), [1])} for n in range(2)})
    assert equal(found["optimizer"]["state"], {names[index]: its for index, its in expected["state"].items()})
    assert found["optimizer"]["param_groups"] == [{**expected["param_groups"][0], "params": names}]
    plain_model = Net(seed=5)
    plain = torch.optim.AdamW(plain_model.parameters())
    set_optimizer_state_dict(plain_model, plain, found["optimizer"])
    assert equal(plain.state_dict()["state"], expected["state"])


def test_the_commands_of_the_page_convert_to_one_file_and_back(tmp_path):
    """A file of plain torch's, model and optimizer by name, is loaded after torch's other command."""
    run = a_run(ONE, None, steps=1)
    checkpoint.save(tmp_path / "one", *run)
    for mode, source, target in (("dcp_to_torch", "one", "one.pt"), ("torch_to_dcp", "one.pt", "again")):
        ended = run_module("torch.distributed.checkpoint.format_utils", mode, tmp_path / source, tmp_path / target)
        assert ended.code == 0, ended
    others = a_run(ONE, None, seed=1)
    checkpoint.load(tmp_path / "again", *others)
    assert equal(weights(others[0]), weights(run[0])) and equal(full(others[1]), full(run[1]))


# ------------------------------------------------------------------------------------------------------------- experts


def with_experts(rank, names, group, seed=0):
    """Return a model with a dense layer and some experts of `group`, and the Chained of both."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"dense": nn.Linear(4, 4), **{name: nn.Linear(4, 4) for name in names}})
    if seed == 0:
        for name in names:  # each expert has its own values, the same on its ranks
            for param in model[name].parameters():
                param.data.fill_(float(name[-1]) + 1)
    experts = [param for name in names for param in model[name].parameters()]
    optimizer = Chained(wrapped(STAGES[3], model["dense"].parameters(), lr=0.1),
                        wrapped(STAGES[3], experts, lr=0.1, process_group=group))
    for step in range(2 if seed == 0 else 0):
        sum((step + 1) * model[name](torch.ones(2, 4)).square().mean() for name in model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@on_ranks(4)
def test_experts_of_smaller_process_groups_are_saved_together_by_their_global_names(rank, tmp_path):
    """EP 2 -> EP 4 -> EP 1. Equal names of unlike experts are refused: DCP would keep one rank's, in silence."""
    pairs, singles = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], [dist.new_group([n]) for n in range(4)]
    half = rank.rank // 2
    model, optimizer = with_experts(rank, [f"expert{2 * half}", f"expert{2 * half + 1}"], pairs[half])
    checkpoint.save(tmp_path / "ep2", model, optimizer, {"rank": rank.rank})
    alone = with_experts(rank, [f"expert{rank.rank}"], singles[rank.rank], seed=1)
    assert checkpoint.load(tmp_path / "ep2", *alone) == {"rank": rank.rank}
    checkpoint.save(tmp_path / "ep4", *alone)
    everyone = with_experts(rank, [f"expert{n}" for n in range(4)], None, seed=2)
    checkpoint.load(tmp_path / "ep4", *everyone)
    for name, tensor in model.state_dict().items():
        assert equal(everyone[0].state_dict()[name], tensor), name
    again = with_experts(rank, [f"expert{2 * half}", f"expert{2 * half + 1}"], pairs[half], seed=3)
    checkpoint.save(tmp_path / "ep1", *everyone)
    checkpoint.load(tmp_path / "ep1", *again)
    for one, other in zip(optimizer.optimizers, again[1].optimizers):
        assert equal(full(one), full(other))
    same_names = with_experts(rank, ["expert0"], pairs[half])
    line = said_by_all(error_of(lambda: checkpoint.save(tmp_path / "never", *same_names), checkpoint.UnfitModel))
    assert "give each expert a name of its own, such as its number" in line and not (tmp_path / "never").exists()
    lacks_one = with_experts(rank, ["expert0"], None)
    line = said_by_all(error_of(lambda: checkpoint.load(tmp_path / "ep2", *lacks_one), checkpoint.ForeignCheckpoint))
    assert "it has model.expert" in line and line.endswith("which this model and optimizer don't have")
