"""save, load and latest: to and from torch's own programs, without process groups, and with experts."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import checkpoint
from checkpoint.storage import METADATA
from guard.chained import Chained
from harness import STAGE_4
from tests.checkpoint import ONE_PROCESS, make_optimizer, make_run, train
from tests.checkpoint.compare import equal, full_state, said_by_all
from tests.common import STAGES, error_of, mesh_of, on_ranks


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))


@on_ranks(2)
def test_an_fsdp2_run_goes_on_in_stage_4_and_back_to_the_bit(rank, tmp_path):
    """Save by FSDP2 in torchtitan's form: the model at the top, and hyperparameters of each parameter.

    `test_torchs_converters_make_one_file_and_back` loads the other form.
    """
    fsdp_model = fully_shard(make_model(seed=0), mesh=mesh_of("cpu", (2,)))
    adamw = torch.optim.AdamW(fsdp_model.parameters(), lr=0.01)
    model = make_model(seed=1)
    optimizer = make_optimizer(STAGE_4, model.parameters(), lr=9.0)

    def train_both_alike(steps):
        train(rank, fsdp_model, adamw, steps)
        train(rank, model, optimizer, steps)
        for param, expected in zip(model.parameters(), fsdp_model.parameters()):
            assert torch.equal(param, expected.full_tensor())

    train(rank, fsdp_model, adamw, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(fsdp_model, adamw, options=options)
    dcp.save({**model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "fsdp")
    assert checkpoint.load(tmp_path / "fsdp", model, optimizer) is None
    assert optimizer.param_groups[0]["lr"] == 0.01
    train_both_alike(range(3, 6))

    checkpoint.save(tmp_path / "stage 4", model, optimizer)
    train(rank, fsdp_model, adamw, range(9))  # no trace of these steps may stay
    model_state, optimizer_state = get_state_dict(fsdp_model, adamw)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "stage 4")
    set_state_dict(fsdp_model, adamw, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train_both_alike(range(6, 9))


@on_ranks(2, stage=STAGES)
def test_torchs_converters_make_one_file_and_back(rank, stage, tmp_path):
    """Names, shapes and values in the file are those of plain torch, without padding."""
    model, optimizer = make_run(rank, stage, steps=2)
    checkpoint.save(tmp_path / stage, model, optimizer)
    expected = full_state(optimizer)
    names = [name for name, _ in model.named_parameters()]
    if rank.number == 0:
        dcp_to_torch_save(tmp_path / stage, tmp_path / "one.pt")
        content = torch.load(tmp_path / "one.pt", weights_only=True)
        assert equal(content["model"], model.state_dict())
        state_by_name = {names[index]: entries for index, entries in expected["state"].items()}
        assert equal(content["optimizer"]["state"], state_by_name)
        assert content["optimizer"]["param_groups"] == [{**expected["param_groups"][0], "params": names}]
        torch_save_to_dcp(tmp_path / "one.pt", tmp_path / f"{stage} again")
    dist.barrier()
    new_model, new_optimizer = make_run(rank, stage, seed=1)
    assert checkpoint.load(tmp_path / f"{stage} again", new_model, new_optimizer) is None
    assert equal(new_model.state_dict(), model.state_dict()) and equal(full_state(new_optimizer), expected)


def test_a_program_without_process_groups_saves_a_fresh_optimizer_and_leaves_it_fresh(tmp_path):
    model, optimizer = make_run(ONE_PROCESS, None)
    checkpoint.save(tmp_path / "fresh", model, optimizer, 1, asynchronous=True).result()
    assert not optimizer.state and checkpoint.load(tmp_path / "fresh", model, optimizer) == 1


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for name in ("epoch-10", "epoch-9", "best", "step-11.0123abcd.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).touch()
    (tmp_path / "step-12" / METADATA).mkdir(parents=True)  # a folder in place of the file
    assert checkpoint.latest(tmp_path) == tmp_path / "epoch-10"


@on_ranks(2)
def test_unlike_experts_of_one_name_are_not_saved(rank, tmp_path):
    """Without this error DCP would keep the expert of one rank. tests/pages/test_experts.py saves and loads experts."""
    own_group, _ = dist.new_subgroups(group_size=1)
    model = nn.ModuleDict({"dense": nn.Linear(4, 4), "expert": nn.Linear(4, 4)})
    optimizer = Chained(
        make_optimizer(STAGE_4, model["dense"].parameters()),
        make_optimizer(STAGE_4, model["expert"].parameters(), process_group=own_group))
    line = error_of(lambda: checkpoint.save(tmp_path / "never", model, optimizer), checkpoint.UnfitModel)
    assert "each expert needs a name of its own" in said_by_all(line) and not (tmp_path / "never").exists()
