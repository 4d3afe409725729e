"""What a user may write by mistake: one line that says what is possible, exit code 2, and nothing has begun."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import bench
from harness import STAGE_1
from harness.measuring import timeline, two_hosts
from harness.planning import plan
from harness.ranks import command_line
from harness.training import train
from tests.checkpoint import full_disk
from tests.common import STAGES
from tests.ranks import ROOT, run_alone


def make(*arguments):
    """make, where what it would start is only printed."""
    return subprocess.run(["make", *arguments, "PYTHON=echo"], cwd=ROOT, env={**os.environ, "LC_ALL": "C"},
                          capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("arguments, message", [
    *((["train", f"STAGE={stage}"], f"STAGE={stage}: there are stages 1 to {len(STAGES)}")
      for stage in ("*", "%", "", len(STAGES) + 1, "1 2")),
    *((["train", f"NPROC={n}"], f"NPROC={n}: it must be a number from 1 to 256")
      for n in ("99999999999", "0", "", "%", "two", "257")),
    *((["bench", "WHAT=timeline", f"STAGE={stage}"], f"STAGE={stage}: there are stages 1 to {len(STAGES)}, and all")
      for stage in ("", "*", "9")),
    *((["bench", f"WHAT={what}"], f"WHAT={what}: there are rows network curve timeline host cuda")
      for what in ("", "%", "gpu", "host cuda")),
    *((["diff", f"A={a}", "B=2"], f"there is no stage {a}: write A=2 B=3") for a in ("*", "7", "%", "1 2")),
], ids=str)
def test_a_wrong_variable_of_make_is_one_line(arguments, message):
    ended = make(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "") and f"*** {message}.  Stop." in ended.stderr


@pytest.mark.parametrize("arguments, command", [
    (["train", "STAGE=3", "NPROC=256"], "--nproc-per-node 256 stage3_gradbuffer/train.py"),
    (["bench", "WHAT=timeline", "STAGE=all"], "-m harness.measuring.timeline --rows all"),
    (["bench", "STAGE=9"], "bench.py --json measured/bench.json"),
    (["bench", "WHAT=network", "RATE=9gbit"],
     "-m harness.measuring.two_hosts --rate 9gbit --json measured/network.json"),
    *((["bench", f"WHAT={what}", f"ARGS={arguments}"], f"--json measured/{file}.json {arguments}")
      for what, arguments, file in (("rows", "--rows variants", "bench_variants"), ("rows", "--rows stage", "bench"),
                                    ("network", "--rows variants", "network_variants"))),
    *((["bench", f"WHAT={what}", "ARGS=--help"], f"-m harness.measuring.{module} --help") for what, module in (
        ("curve", "two_hosts --curve --rounds 3"), ("host", "host_time"), ("cuda", "gpu_step"))),
], ids=str)
def test_a_right_variable_of_make_is_taken(arguments, command):
    ended = make(*arguments)
    assert ended.returncode == 0 and command in ended.stdout, ended.stderr


def refuse(message):
    raise ValueError(message)


OPTIONS = {  # program -> its main, and what is wrong: options, and words of the line that says so
    "train.py": (lambda: train.parse_args(""), [
        (["--model", "huge"], "huge"),
        (["--steps", "9" * 30], "--steps: must be a whole number from 1 to 1e+06, not 999"),
        (["--seed", str(2**63)], "--seed: must be a whole number from 0 to 9.22337e+18, not 92233720"),
        (["--seed", "9" * 400], "--seed"),
        (["--batch-size", "1000001"], "--batch-size: must be a whole number from 1 to 1e+06, not 1000001"),
        (["--accumulate", "9" * 30], "--accumulate"), (["--lr", "inf"], "--lr"), (["--clip", "nan"], "--clip"),
        (["--sequence-length", "100000"], "--sequence-length"), (["--checkpoint", ""], "--checkpoint"),
        (["--timeout", "0"], "--timeout: must be a number from 0.001 to 1e+06, not 0"),
        (["--timeout", "1e9"], "--timeout: must be a number from 0.001 to 1e+06, not 1e9"),
        (["--keep", "-1"], "--keep: must be a whole number from 0 to 1e+06, not -1"),
        *(([option, "2"], "--save-every and --keep: there is no --checkpoint DIR to save in")
          for option in ("--save-every", "--keep"))]),
    "bench.py": (bench.main, [
        (["--ranks", "0"], "--ranks: must be a whole number from 1 to 1e+06, not 0"), (["--model", "huge"], "huge"),
        (["--data", "/nowhere"], "--data /nowhere: there is no such file or folder"),
        (["--rows", "stage 9"], "stage 9"), (["--json", ""], "--json .: Is a directory"),
        (["--json", "results"], "Is a directory")]),
    "timeline": (timeline.main, [
        (["--model", "huge"], "'huge'"), (["--batch-size", "0"], "--batch-size: must be a"),
        (["--ranks", "0"], "--ranks: must be a"),
        (["--rows", "zero"], "--rows 'zero'"), (["--out", "results"], "--out results: Is a directory"),
        (["--out", "a.png"], "--out a.png: the picture is an SVG")]),
    "network": (two_hosts.main, [
        (["--rate", "fast"], "--rate fast"), (["--rate", "0gbit"], "--rate 0gbit"),
        (["--rate", "9999999gbit"], "--rate 9999999gbit"), (["--rate", "0.5kbit"], "from 1kbit to 1000gbit"),
        (["--curve", "1gbit,fast"], "--rate fast"), (["--steps", "0"], "--steps"), (["--model", "huge"], "'huge'"),
        (["--rows", "zero"], "--rows 'zero'"), (["--sequence-length", "9999"], "9999"),
        (["--timeout", "99999999999"], "from 1 to 1e+06"), (["--json", "results"], "results: Is a directory"),
        (["--json", "net.svg"], "choose another ending"), (["--json", "x" * 300], "File name too long"),
        (["--json", "/dev/null"], "--json /dev/null: it is no file"),
        *((["--json", f"results/{name}.json"], "something else than results of make") for name in ("bench", "plan"))]),
    "plan": (plan.parse, [
        (["--model", "8b"], "argument --model: invalid choice: '8b'"),
        *((["--world", world], f"--world: must be a whole number from 1 to 4096, not {world}")
          for world in ("0", "5000")),
        (["--device-memory", "much"], "--device-memory: must be a number from 0.001 to 1e+06, not much"),
        (["--model", "gpt2", "--tensor-parallel", "2"], "the heads of gpt2 can't be shared out so"),
        (["--model", "tiny", "--sequence-length", "300"], "--sequence-length 300: tiny takes at most 256"),
        *(([option, text], f"{option}: must be a number from 0.001 to 1e+06, not {text}") for text in (
            "0", "inf", "nan", "1e-9", "-1") for option in ("--bucket-cap-mb", "--device-memory")),
        (["--layers", "1000000000", "--width", "128"], "--layers: must be a whole number from 0 to 1000"),
        (["--layers", "2", "--width", "12800000000"], "--width: must be a whole number from 0 to 131072"),
        (["--layers", "2"], "--layers and --width: give both, and a width that is a multiple of 128")]),
}


@pytest.mark.parametrize("program", OPTIONS)
def test_a_wrong_option_is_one_line(program, monkeypatch, capsys, tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")  # where a program may write it looks by writing
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")  # of another launcher
    main, cases = OPTIONS[program]
    for arguments, says in cases:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith(f"{program}: error: ") and error.count("\n") == 1, arguments
        assert says in error, arguments


def test_a_result_is_written_before_it_is_shown_and_on_a_full_disk_the_one_before_stays(tmp_path, capsys):
    """As in `make bench | head -1`: nobody may read what is printed any more. And [a] in a path is no markup."""
    path, shown = tmp_path / "[a].json", mock.Mock(side_effect=[BrokenPipeError, None, None])
    with pytest.raises(BrokenPipeError):
        command_line.write_and_show(path, "before", refuse, shown)
    with full_disk(100), pytest.raises(ValueError, match="^--json .*: not written: File too large$"):
        command_line.write_and_show(path, "x" * 1000, refuse, shown)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    command_line.write_and_show(path, "after", refuse, shown)
    assert (path.read_text(), capsys.readouterr().out, shown.call_count) == ("after", f"written to {path}\n", 3)


def test_what_is_written_is_behind_a_link_and_no_device_is_replaced(tmp_path):
    """A link to nothing yet may be written, and the check leaves nothing there. A loop of links is refused by it."""
    for name, target in (("a", "b"), ("b", "a"), ("link", "there")):
        (tmp_path / name).symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=f"^--json {tmp_path}/a: .*link.*$"):
        command_line.check_writable("--json", tmp_path / "a", refuse)
    command_line.check_writable("--json", tmp_path / "link", refuse)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "link"]
    command_line.write("--json", tmp_path / "link", "é", refuse)
    read, write = os.pipe()
    with open(read, encoding="utf-8") as opened:
        command_line.write("--json", Path(f"/dev/fd/{write}"), "é", refuse)
        os.close(write)
        assert opened.read() == (tmp_path / "there").read_text(encoding="utf-8") == "é"
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "link", "there"] and (tmp_path / "link").is_symlink()


ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize("wrong, message", [
    *(({"RANK": rank}, f"RANK={rank} and WORLD_SIZE=1 in the environment: they must be numbers, the first below the "
                       "second") for rank in ("abc", "-1", "1")),
    *(({"WORLD_SIZE": size}, f"RANK=0 and WORLD_SIZE={size} in the env") for size in ("0", "9" * 30, "")),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x and LOCAL_WORLD_SIZE=1 in the environment: they must be numbers"),
    ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=0 and LOCAL_WORLD_SIZE=0 in the environment: they must be numbers"),
    ({"MASTER_PORT": "http"}, "'http'"),
], ids=str)
def test_a_launcher_that_says_what_cannot_be_is_one_line(wrong, message):
    ended = run_alone(ROOT / STAGE_1 / "train.py", "--steps", "1", **{**ENVIRONMENT, **wrong})
    assert ended.code == 2 and ended.stderr.startswith("train.py: error: ") and message in ended.stderr
    assert ended.stderr.endswith(": see torchrun\n") and len(ended.stderr.splitlines()) == 1
