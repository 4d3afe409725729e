"""Checkpoints that somebody has changed, with checksums made right again: refused on every rank, and nothing happens.

Nothing runs, nothing is written elsewhere, nothing hangs, no memory is taken without bound, nothing is changed.
"""

import contextlib
import copy
import json
import os
import pickle
import resource
import shutil
import time
import zlib

import pytest
import torch

import checkpoint
from checkpoint import full_state_dict, reading, writing
from checkpoint import manifest as manifests
from checkpoint.folder import LOCK
from tests.checkpoint.test_checkpoint import Exploit, a_run, equal, step_alike
from tests.common import STAGES

ADAMW = {"lr": 0.01, "weight_decay": 0.1}
WEIGHT, MOMENT = "model.embed.weight", "optimizer.state.embed.weight.exp_avg"


def save(rank, stage, path):
    model, optimizer = a_run(rank, stage, None, **ADAMW)
    step_alike(rank, model, optimizer, range(2))
    checkpoint.save(path, model, optimizer, {"step": 2, "average": torch.arange(100.0)})


def refused(rank, stage, path):
    """-> the message, after everything was found as it had been."""
    model, optimizer = a_run(rank, stage, None, seed=7)
    step_alike(rank, model, optimizer, range(1))
    before = full_state_dict(optimizer, to_all=True), copy.deepcopy(dict(model.state_dict()))
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(checkpoint.CheckpointError) as refusal:
        checkpoint.load(path, model, optimizer)
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 600_000  # KiB
    assert equal(full_state_dict(optimizer, to_all=True), before[0]) and equal(dict(model.state_dict()), before[1])
    step_alike(rank, model, optimizer, range(1))
    return str(refusal.value)


# ------------------------------------------------------------------------------------------------------- ways to tamper
# name -> function(manifest, folder): changes the one, or files in the other, or returns the manifest's text.

WAYS = {}


def way(function):
    WAYS[function.__name__.replace("_", " ")] = function
    return function


def each(**changes):
    """Several ways in which a place in the manifest may be changed: name -> function(manifest)."""
    for name, change in changes.items():
        WAYS[name.replace("_", " ")] = lambda manifest, _, change=change: change(manifest)


def a_file(manifest):
    return max(name for name in manifest["files"] if name.endswith(".bin"))


def renamed(manifest, name):
    """Whatever refers to a file refers to `name` now."""
    old = a_file(manifest)
    manifest["files"][name] = manifest["files"].pop(old)
    for tensor in manifest["tensors"].values():
        tensor["ranges"] = [[start, stop, name if file == old else file, at]
                            for start, stop, file, at in tensor["ranges"]]
    return old


def moved(manifest, folder, name):
    os.rename(folder / renamed(manifest, name), folder / name)


def replaced(manifest, folder, make):
    path = folder / a_file(manifest)
    path.rename(folder.parent / "outside" / path.name)
    make(path, folder.parent / "outside" / path.name)


@way
def a_file_in_the_folder_above(manifest, folder):
    moved(manifest, folder, "../outside/x.bin")


@way
def a_file_by_its_absolute_path(manifest, folder):
    moved(manifest, folder, str(folder.parent / "outside" / "x.bin"))


@way
def a_file_in_a_folder_below(manifest, folder):
    (folder / "below").mkdir()
    moved(manifest, folder, "below/x.bin")


@way
def a_file_without_a_name(manifest, folder):
    renamed(manifest, "")


@way
def a_file_called_dot(manifest, folder):
    renamed(manifest, ".")


@way
def a_file_with_a_zero_byte_in_its_name(manifest, folder):
    renamed(manifest, "x\0.bin")


@way
def the_manifest_as_a_file(manifest, folder):
    renamed(manifest, "manifest.json")


@way
def a_link_to_outside(manifest, folder):
    replaced(manifest, folder, lambda path, outside: path.symlink_to(outside))


@way
def a_link_to_dev_zero(manifest, folder):
    replaced(manifest, folder, lambda path, _: path.symlink_to("/dev/zero"))


@way
def a_fifo(manifest, folder):
    replaced(manifest, folder, lambda path, _: os.mkfifo(path))


@way
def a_folder_for_a_file(manifest, folder):
    replaced(manifest, folder, lambda path, _: path.mkdir())


@way
def a_link_inside_the_folder(manifest, folder):
    first = min(name for name in manifest["files"] if name.endswith(".bin"))
    replaced(manifest, folder, lambda path, _: path.symlink_to(first))


@way
def the_manifest_as_a_link(manifest, folder):
    outside = folder.parent / "outside" / "manifest.json"
    outside.write_text(json.dumps(manifest))
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to(outside)


@way
def the_manifest_as_a_fifo(manifest, folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


@way
def a_manifest_of_many_bytes(manifest, folder):
    os.truncate(folder / "manifest.json", 2**40)


@way
def a_file_of_many_bytes(manifest, folder):
    os.truncate(folder / a_file(manifest), 2**40)


@way
def a_pickle_for_a_manifest(manifest, folder):
    (folder / "manifest.json").write_bytes(pickle.dumps(Exploit()))


@way
def a_list_for_a_manifest(manifest, folder):
    (folder / "manifest.json").write_text("[]")


@way
def a_manifest_without_its_checksum(manifest, folder):
    (folder / "manifest.json").write_text(json.dumps(manifest))


@way
def a_manifest_with_the_checksum_of_another(manifest, folder):
    """A bit of a weight decay, say, is another."""
    text = (folder / "manifest.json").read_text()
    assert text.count('["weight_decay", 0.1]') == 1
    (folder / "manifest.json").write_text(text.replace('["weight_decay", 0.1]', '["weight_decay", 0.9]'))


@way
def ten_thousand_lists_in_each_other(manifest, folder):
    manifest["extra"][0] = "here"
    return json.dumps(manifest).replace('"here"', "[" * 10_000 + "]" * 10_000)


@way
def sixty_megabytes_of_lists(manifest, folder):
    manifest["extra"][0] = "here"
    return json.dumps(manifest).replace('"here"', "[" + "[]," * 20_000_000 + "0]")


@way
def tuples_in_each_other(manifest, folder):
    for _ in range(60):
        manifest["extra"][0] = {"tuple": [manifest["extra"][0]]}


@way
def ranges_of_one_element(manifest, folder):
    entry = manifest["tensors"]["extra.0.average"]
    ((_, stop, file, offset),) = entry["ranges"]
    entry["ranges"] = [[i, i + 1, file, offset + 4 * i] for i in range(stop)]


@way
def a_file_with_eight_gigabytes_of_nothing(manifest, folder):
    """Whose checksum would be right."""
    name = a_file(manifest)
    os.truncate(folder / name, 2**33)
    manifest["files"][name]["bytes"] = 2**33


@way
def a_number_of_a_million_digits(manifest, folder):
    manifest["ranks"] = "here"
    return json.dumps(manifest).replace('"here"', "9" * 1_000_000)


@way
def a_key_that_comes_twice(manifest, folder):
    return json.dumps(manifest)[:-1] + ', "ranks": 2}'


def ranges(change, key=None):
    """change(ranges of a tensor); by default of a moment of which each rank has written a part."""
    def of(manifest):
        moments = [name for name in manifest["tensors"] if name.endswith("exp_avg")]
        most = max(moments, key=lambda name: len(manifest["tensors"][name]["ranges"]))
        found = manifest["tensors"][key or most]["ranges"]
        assert key or len({file for _, _, file, _ in found}) > 1
        change(found)
    return of


def tensor(key=MOMENT, **changes):
    return lambda manifest: manifest["tensors"][key].update(changes)


def in_a_range(place, value):
    return ranges(lambda found: found[0].__setitem__(place, value))


each(
    another_format=lambda m: m.update(format=99),
    the_other_byte_order=lambda m: m.update(byteorder="big"),
    no_ranks=lambda m: m.update(ranks=0),
    more_ranks_than_extras=lambda m: m.update(ranks=10**9),
    an_entry_of_another_name=lambda m: m.update(code="print(1)"),
    an_entry_less=lambda m: m.pop("extra"),
    more_bytes_than_there_are=lambda m: m["files"][a_file(m)].update(bytes=10**15),
    less_than_no_bytes=lambda m: m["files"][a_file(m)].update(bytes=-1),
    half_a_byte=lambda m: m["files"][a_file(m)].update(bytes=0.5),
    true_bytes=lambda m: m["files"][a_file(m)].update(bytes=True),
    a_text_for_a_checksum=lambda m: m["files"][a_file(m)].update(crc32="0"),
    a_range_less=ranges(lambda found: found.pop()),
    no_range=ranges(lambda found: found.clear()),
    no_range_of_a_parameter=ranges(lambda found: found.clear(), WEIGHT),
    a_range_twice=ranges(lambda found: found.append(found[-1])),
    ranges_that_overlap=ranges(lambda found: found[0].__setitem__(1, found[0][1] + 1)),
    a_gap_between_ranges=ranges(lambda found: found[0].__setitem__(1, found[0][1] - 1)),
    a_range_beyond_the_tensor=ranges(lambda found: found[-1].__setitem__(1, 10**6)),
    a_range_that_ends_before_it_starts=ranges(lambda found: found[0].__setitem__(1, -5)),
    a_range_that_starts_below_zero=in_a_range(0, -1),
    an_offset_below_zero=in_a_range(3, -1),
    an_offset_beyond_the_file=in_a_range(3, 10**12),
    an_offset_of_half=in_a_range(3, 0.5),
    a_text_for_an_offset=in_a_range(3, "0"),
    not_a_number_for_an_offset=in_a_range(3, float("nan")),
    a_range_in_no_file=in_a_range(2, "nowhere.bin"),
    a_range_in_the_manifest=in_a_range(2, "manifest.json"),
    a_list_for_a_file=in_a_range(2, []),
    two_tensors_in_the_same_bytes=lambda m: m["tensors"][MOMENT].update(
        ranges=copy.deepcopy(m["tensors"][MOMENT + "_sq"]["ranges"])),
    a_shape_of_many=tensor(shape=[2**40]),
    a_shape_of_too_many=tensor(shape=[2**40, 2**40]),
    a_shape_of_many_zeros=tensor(shape=[0] * 10_000),
    a_shape_below_zero=tensor(shape=[-5, -7]),
    a_shape_of_a_text=tensor(shape="57"),
    a_parameter_of_another_shape=tensor(WEIGHT, shape=[7, 5]),
    a_moment_of_another_shape=tensor(shape=[7, 5]),
    a_dtype_that_is_none=tensor(dtype="load"),
    a_dtype_of_more_bytes=tensor(dtype="complex128"),
    a_dtype_of_another_kind=tensor(dtype="int32"),
    a_parameter_of_another_kind=tensor(WEIGHT, dtype="int32"),
    a_count_of_another_kind=lambda m: entry(m, "step", {"data": ["int32", [], "AAAAAA=="]}),
    more_dimensions_before_than_there_are=tensor(n_lead=3),
    dimensions_before_that_others_have_not=tensor(n_lead=1),
    dimensions_before_below_zero=tensor(n_lead=-1),
    an_entry_more_in_a_tensor=tensor(layout="sparse"),
    a_tensor_that_nobody_claims=lambda m: m["tensors"].update(
        more={**m["tensors"][MOMENT], "ranges": [], "shape": [0]}),
    a_tensor_less=lambda m: m["tensors"].pop(MOMENT),
    a_parameter_less=lambda m: m["tensors"].pop(WEIGHT),
    a_name_less=lambda m: m["model"].remove("embed.weight"),
    a_name_twice=lambda m: m["model"].append("embed.weight"),
    a_number_for_a_name=lambda m: m["model"].append(3),
    another_optimizer=lambda m: m.update(optimizer="SGD"),
    groups_of_other_parameters=lambda m: m["groups"][0]["params"].reverse(),
    a_group_less=lambda m: m["groups"].clear(),
    a_text_for_a_learning_rate=lambda m: option(m, "lr", "fast"),
    a_beta_less=lambda m: option(m, "betas", {"tuple": [0.9]}),
    a_number_for_betas=lambda m: option(m, "betas", 0.9),
    a_group_with_other_parameters_in_its_options=lambda m: option(m, "params", []),
    a_state_of_no_parameter=lambda m: m["states"].update(nothing=m["states"].pop("embed.weight")),
    a_state_of_nothing=lambda m: m["states"].update({"embed.weight": {"dict": []}}),
    a_list_for_a_state=lambda m: m["states"].update({"embed.weight": []}),
    a_moment_that_is_another_ones=lambda m: entry(m, "exp_avg", {"piece": MOMENT + "_sq"}),
    a_moment_that_is_a_parameter=lambda m: entry(m, "exp_avg", {"piece": WEIGHT}),
    a_moment_that_is_nowhere=lambda m: entry(m, "exp_avg", {"piece": "nowhere"}),
    a_moment_that_is_whole_on_each_rank=lambda m: entry(m, "exp_avg", {"tensor": MOMENT}),
    a_number_for_a_moment=lambda m: (entry(m, "exp_avg", 0.0), m["tensors"].pop(MOMENT)),
    a_count_of_another_shape=lambda m: entry(m, "step", {"data": ["float32", [2], "AAAAAAAAAAA="]}),
    a_pickle_in_a_state=lambda m: entry(m, "step", {"pickle": "gASVAAAA"}),
    a_text_for_a_count=lambda m: entry(m, "step", {"data": ["float32", [], "?"]}),
    fewer_bytes_than_a_tensor_has=lambda m: entry(m, "step", {"data": ["float32", [], "AAA="]}),
    a_large_tensor_of_few_bytes=lambda m: entry(m, "step", {"data": ["float32", [2**40], "AAAAAA=="]}),
    a_deque_below_zero=lambda m: extra(m, {"deque": [-1, [1]]}),
    a_list_for_a_key=lambda m: extra(m, {"dict": [[[1], 2]]}),
    two_kinds_at_once=lambda m: extra(m, {"dict": [], "list": []}),
    an_extra_that_is_nowhere=lambda m: extra(m, {"tensor": "nowhere"}),
    an_extra_that_is_a_piece=lambda m: extra(m, {"piece": "extra.0.average"}),
)


def option(manifest, key, value):
    options = manifest["groups"][0]["options"]["dict"]
    options[:] = [pair for pair in options if pair[0] != key] + [[key, value]]


def entry(manifest, key, value):
    next(pair for pair in manifest["states"]["embed.weight"]["dict"] if pair[0] == key)[1] = value


def extra(manifest, value):
    manifest["extra"][0] = value


def tamper(folder, change):
    """Changes a checkpoint, and makes the checksums right again."""
    file = folder / "manifest.json"
    before = file.read_bytes()
    manifest = json.loads(before)
    del manifest["crc32"]
    text = change(manifest, folder)
    for name, written in manifest.get("files", {}).items():
        with contextlib.suppress(OSError, ValueError):
            path = folder / name
            if path.is_file() and not path.is_symlink() and written["bytes"] == path.stat().st_size < 10**8:
                written["crc32"] = zlib.crc32(path.read_bytes()) if isinstance(written["crc32"], int) else "0"
    is_untouched = file.is_file() and not file.is_symlink() and file.stat().st_size == len(before)
    if is_untouched and file.read_bytes() == before:
        file.write_bytes(sealed(text) if isinstance(text, str) else manifests.sealed(manifest))


def sealed(text):
    """JSON with its checksum, whatever it says."""
    return b'{"crc32": %d, %b' % (zlib.crc32(text.encode()), text[1:].encode())


def outside_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*") if folder not in path.parents}




@pytest.mark.parametrize("world_size", [2])
def test_a_checkpoint_that_was_tampered_with_is_refused(run, world_size, tmp_path, capfd):
    run(save, STAGES[3], tmp_path / "whole")
    for number, what in enumerate(WAYS):
        folder = tmp_path / str(number) / "one"
        shutil.copytree(tmp_path / "whole", folder)
        (folder.parent / "outside").mkdir()
        tamper(folder, WAYS[what])
        before = outside_of(folder)
        for message in run(refused, STAGES[3], folder):
            assert message.startswith(f"checkpoint {folder} can't be loaded: ") and len(message.splitlines()) == 1, what
            assert len(message) < 700, what
        assert outside_of(folder) == before and "code from a file has run" not in capfd.readouterr().out, what


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("world_size", [2])
def test_what_was_not_tampered_with_is_loaded(run, stage, tmp_path):
    """Written anew, with the same content: what refuses the others is not that somebody has touched them."""
    run(save, stage, tmp_path / "one")
    tamper(tmp_path / "one", lambda *_: None)
    run(loaded, stage, tmp_path / "one")


def loaded(rank, stage, path):
    model, optimizer = a_run(rank, stage, None, seed=7)
    assert equal(checkpoint.load(path, model, optimizer), {"step": 2, "average": torch.arange(100.0)})


def no_unpickling(*_, **__):
    raise AssertionError("something was unpickled")


def test_load_unpickles_nothing(tmp_path, monkeypatch):
    """In one process: ranks send each other pickles, which are no files."""
    def a_model():
        model = torch.nn.Linear(64, 64)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))

    model, optimizer = a_model()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "one", model, optimizer, {"average": torch.arange(100.0), "text": "three"})
    other, again = a_model()
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, no_unpickling)
    extra = checkpoint.load(tmp_path / "one", other, again)
    assert extra["average"].equal(torch.arange(100.0)) and extra["text"] == "three"
    assert equal(again.state_dict(), optimizer.state_dict())
    assert equal(dict(other.state_dict()), dict(model.state_dict()))


def fails_at_the_last_tensor(rank, stage, path):
    """On rank 1 only, after everything has been checked: as a disk does that breaks meanwhile."""
    read = reading.read_box

    def read_until(path, stored, *args):
        if rank.rank == 1 and stored.shape == (100,):  # what comes last
            raise OSError(5, "Input/output error")
        return read(path, stored, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "read_box", read_until)
        message = refused(rank, stage, path)
    assert "rank 1: Input/output error" in message


@pytest.mark.parametrize("stage", STAGES[1::2])
@pytest.mark.parametrize("world_size", [2])
def test_what_cannot_be_read_to_its_end_changes_nothing(run, stage, tmp_path):
    run(save, stage, tmp_path / "one")
    run(fails_at_the_last_tensor, stage, tmp_path / "one")


def writes_something_else(rank, stage, folder, how):
    """What the last rank says that it has written is not what is there."""
    model, optimizer = a_run(rank, stage, None, **ADAMW)
    step_alike(rank, model, optimizer, range(1))
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == rank.world_size - 1:
            write = writing.write_rank_file

            def changed(path, parts):
                answer = write(path, parts)
                how(path, *answer)
                return answer

            patch.setattr(writing, "write_rank_file", changed)
        with pytest.raises(checkpoint.CheckpointError, match="one can't be written: ") as refusal:
            checkpoint.save(folder / "one", model, optimizer)
    return str(refusal.value)


def a_range_is_lost(path, entries, written):
    next(entry for entry in entries.values() if entry["ranges"])["ranges"].pop()


def bytes_are_lost(path, entries, written):
    os.truncate(path, path.stat().st_size - 1)


def a_file_is_lost(path, entries, written):
    path.unlink()


@pytest.mark.parametrize("stage", STAGES[1::2])
@pytest.mark.parametrize("world_size", [2])
def test_what_could_not_be_loaded_is_not_saved(run, stage, tmp_path):
    for number, how in enumerate([a_range_is_lost, bytes_are_lost, a_file_is_lost]):
        folder_of_it = tmp_path / str(number)
        folder_of_it.mkdir()
        print(how)  # pytest shows what was the last
        assert len(set(run(writes_something_else, stage, folder_of_it, how))) == 1
        assert [left.name for left in folder_of_it.iterdir()] == [LOCK]
