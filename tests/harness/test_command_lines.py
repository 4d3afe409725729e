"""What a user may write by mistake: one line that says what is possible, exit code 2, and nothing has begun."""

import os
import subprocess

import pytest

from harness import command_line
from harness.corpus import load_bytes
from tests.common import STAGES
from tests.ranks import ROOT, run_alone, run_with

TRAIN = ROOT / STAGES[0] / "train.py"


def make(*arguments):
    """make, where what it would start is only printed."""
    return subprocess.run(["make", *arguments, "PYTHON=echo"], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("arguments, message", [
    *((["train", f"STAGE={stage}"], f"STAGE={stage}: there are stages 1 to 4") for stage in ("*", "%", "", "5", "1 2")),
    *((["train", f"NPROC={n}"], f"NPROC={n}: it must be a number from 1 to 256")
      for n in ("99999999999", "0", "", "%", "two", "257")),
    *((["bench", "WHAT=timeline", f"STAGE={stage}"], f"STAGE={stage}: there are stages 1 to 4, and all")
      for stage in ("", "*", "9")),
    *((["bench", f"WHAT={what}"], f"WHAT={what}: there are rows network curve timeline host saving cuda")
      for what in ("", "%", "gpu", "host cuda")),
    *((["diff", f"A={a}", "B=2"], f"there is no stage {a}: write A=2 B=3") for a in ("*", "7", "%", "1 2")),
], ids=str)
def test_a_wrong_variable_of_make_is_one_line(arguments, message):
    ended = make(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "") and f"*** {message}.  Stop." in ended.stderr


@pytest.mark.parametrize("arguments, command", [
    (["train", "STAGE=3", "NPROC=256"], "--nproc-per-node 256 stage3_gradbuffer/train.py"),
    (["bench", "WHAT=timeline", "STAGE=all"], "-m harness.timeline --rows all"),
    (["bench", "STAGE=9"], "bench.py --json measured/bench.json"),
    (["bench", "WHAT=network", "RATE=9gbit"], "-m harness.two_hosts --rate 9gbit --json measured/network.json"),
    *((["bench", f"WHAT={what}", "ARGS=--help"], f"-m harness.{module} --help") for what, module in (
        ("curve", "two_hosts --curve --rounds 3"), ("host", "host_time"), ("saving", "saving"), ("cuda", "gpu_step"))),
], ids=str)
def test_a_right_variable_of_make_is_taken(arguments, command):
    ended = make(*arguments)
    assert ended.returncode == 0 and command in ended.stdout, ended.stderr


@pytest.mark.parametrize("program", ["train.py", "bench.py"])
def test_a_fifo_for_data_is_not_waited_for(program, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    script, more = (TRAIN, ["--model", "nano"]) if program == "train.py" else (ROOT / "bench.py", ["--quick"])
    ended = run_alone(script, *more, "--data", tmp_path / "fifo")
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert ended.code == 2 and f"--data {tmp_path}/fifo: it is no file and no folder" in line


def test_a_character_device_is_read(monkeypatch):
    monkeypatch.setattr("harness.corpus.DATA_BYTES", 1000)
    assert load_bytes("/dev/zero").tolist() == [0] * 1000


def loop_of_links(folder):
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"


@pytest.mark.parametrize("what", ["nothing", "a loop of links", "a folder"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(what, tmp_path):
    path, message = {"nothing": ("", "--json '': it names no file"), "a folder": (tmp_path, "it is a folder"),
                     "a loop of links": (loop_of_links(tmp_path), "Too many levels of symbolic links")}[what]
    ended = run_alone(ROOT / "bench.py", "--quick", "--json", path)
    assert ended.code == 2 and "Traceback" not in ended.stderr and not ended.stdout
    (line,) = ended.stderr.splitlines()
    assert line.startswith("bench.py: error: --json ") and message in line


def test_a_link_to_nothing_yet_may_be_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    command_line.check_writable("--json", tmp_path / "link", pytest.fail)
    assert not (tmp_path / "there").exists()


ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize("wrong, message", [
    ({"RANK": "abc"}, "RANK=abc in the environment: it must be a number from 0 on, see torchrun"),
    ({"RANK": "-1"}, "RANK=-1 in the environment: it must be a number from 0 on, see torchrun"),
    ({"RANK": "1"}, "RANK=1 in the environment: it must be below WORLD_SIZE=1"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment: it must be a number from 1 on, see torchrun"),
    ({"WORLD_SIZE": "9" * 30}, f"WORLD_SIZE={'9' * 30} in the environment: it must be a number from 1 on, see "
                               "torchrun"),
    ({"WORLD_SIZE": None}, "WORLD_SIZE= in the environment: it must be a number from 1 on, see torchrun"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x in the environment: it must be a number from 0 on, see torchrun"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT=http in the environment: it must be a number from 0 on, see torchrun"),
], ids=str)
def test_a_launcher_that_says_what_cannot_be_is_one_line(wrong, message):
    environment = {key: value for key, value in {**ENVIRONMENT, **wrong}.items() if value is not None}
    (ended,) = run_with([environment], TRAIN, "--steps", "1")
    assert (ended.code, ended.stderr) == (2, f"train.py: error: {message}\n")
