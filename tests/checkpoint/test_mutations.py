"""A share of `python -m tests.checkpoint.mutations`, all of which is in make faults; and the same on two ranks."""

import json
import random
import shutil

import pytest
import torch

import checkpoint
from tests.checkpoint import mutations
from tests.checkpoint.mutations import CASES, KINDS, made, mutate, run, same, save_one, state_of, step


def test_whatever_is_changed_is_refused_or_loaded_stepped_and_saved():
    """Another share at each size of it: the seed is one that make faults doesn't have."""
    table, wrong = run(5 * len(KINDS), seed=1)
    assert not wrong, "\n".join(wrong)
    assert table.keys() == KINDS.keys() and sum(answers["loaded"] for answers in table.values()) > 5


def mutated_on_two_ranks(rank, number, folder):
    """-> for each mutation what this rank has seen."""
    chance, answers = random.Random(number), []
    for turn in range(number):
        case, name = CASES[2 + turn % 3], sorted(KINDS)[turn % len(KINDS)]
        original, mutated = folder / f"original-{CASES.index(case)}", folder / f"mutated-{turn}"
        if not original.exists():
            torch.distributed.barrier()
            save_one(case, original)
        if rank.rank == 0:
            shutil.copytree(original, mutated)
            mutate(chance, name, mutated)
        torch.distributed.barrier()
        model, optimizer = made(case, 1)
        step(model, optimizer)
        before = state_of(model, optimizer)
        before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in before.items()}
        try:
            checkpoint.load(mutated, model, optimizer)
            answers.append((name, "loaded"))
        except checkpoint.CheckpointError as refusal:
            assert same(before, state_of(model, optimizer)), (name, refusal)
            answers.append((name, str(refusal)))
        step(model, optimizer)
        torch.distributed.barrier()
        if rank.rank == 0:
            shutil.rmtree(mutated)
    return answers


@pytest.mark.parametrize("world_size", [2])
def test_two_ranks_say_the_same_of_whatever_is_changed(run, world_size, tmp_path):
    one, other = run(mutated_on_two_ranks, 60, tmp_path)
    assert one == other and len(one) == 60
    refused = [line for _, line in one if line != "loaded"]
    assert 30 < len(refused) < 60 and all(line.isprintable() for line in refused)


def test_what_is_wrong_is_found(monkeypatch, tmp_path):
    """A load that changes first, one that ends in another error, one that lets pass what can't be stepped."""
    model, optimizer = made(CASES[0], 0)
    checkpoint.save(tmp_path / "one", model, optimizer)

    def changes_first(path, model, optimizer):
        model[0].weight.data.fill_(7)
        raise checkpoint.CheckpointError("too late")

    def fails(path, model, optimizer):
        raise IndexError("nobody thought of it")

    def lets_pass(path, model, optimizer):
        optimizer.param_groups[0]["lr"] = "fast"

    for load, answer in ((changes_first, "changed before it was refused: too late"),
                         (fails, "IndexError: nobody thought of it"), (lets_pass, "loaded; then TypeError: ")):
        monkeypatch.setattr(mutations.checkpoint, "load", load)
        assert mutations.outcome(CASES[0], tmp_path / "one", tmp_path).startswith(answer)
        shutil.rmtree(tmp_path / "again", ignore_errors=True)


def test_the_checksums_are_made_right_again(tmp_path):
    """Else all that is tried is the checksum."""
    save_one(CASES[0], tmp_path / "one")
    chance, n_loaded = random.Random(0), 0
    for turn in range(10):
        shutil.copytree(tmp_path / "one", tmp_path / str(turn))
        mutate(chance, "bytes of a file", tmp_path / str(turn))
        model, optimizer = made(CASES[0], 1)
        checkpoint.load(tmp_path / str(turn), model, optimizer)
        n_loaded += 1
    assert n_loaded == 10 and json.loads((tmp_path / "one" / "manifest.json").read_text())["format"] == 2
