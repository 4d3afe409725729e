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
from harness.measuring import two_hosts
from harness.planning import plan
from harness.ranks import command_line
from harness.training import train
from tests.checkpoint import full_disk
from tests.common import STAGES
from tests.ranks import ROOT, run_alone


def make(*arguments):
    """Run make, which doesn't run what it would start, but prints it."""
    return subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, env={**os.environ, "LC_ALL": "C"},
                          capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("arguments, message", [
    *(([target, f"STAGE={stage}"], f"STAGE={stage}: there are stages {least} to 4, and no package of that name here")
      for target, least, stage in (("grade", 1, 0), ("grade", 1, "nowhere"), ("show", 0, 5), ("show", 0, "a.b"))),
    (["take"], "write STAGE=4 TO=path, the folder of the package that is written"),
    *((["train", f"STAGE={stage}"], f"STAGE={stage}: there are stages 1 to {len(STAGES)}")
      for stage in ("*", len(STAGES) + 1, "1 2")),
    *((["train", f"NPROC={n}"], f"NPROC={n}: it must be a number from 1 to 256")
      for n in ("0", "two", "257")),
    *((["bench", f"WHAT={what}"], f"WHAT={what}: there are rows network cuda small")
      for what in ("gpu", "small cuda")),
    *((["diff", f"A={a}", "B=2"], f"A={a}: there are stages 1 to {len(STAGES)}") for a in ("7", "1 2")),
    (["diff", "A=4"], "B=: there are stages 1 to 4"),
], ids=str)
def test_a_wrong_variable_of_make_is_one_line_before_an_environment_is_made(arguments, message):
    """Without PYTHON: make would begin with `python3 -m venv`."""
    ended = make(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "") and f"*** {message}.  Stop." in ended.stderr


@pytest.mark.parametrize("arguments, command", [
    (["train", "STAGE=3", "NPROC=256"], "-m harness.training.launch 256 stage3_gradbuffer/train.py"),
    (["diff", "A=2"], "-m harness.publishing.stages diff 2 3"), (["diff"], "-m harness.publishing.stages diff 1 2"),
    (["grade", "STAGE=stage4_overlap.optimizer"], "-m grade stage4_overlap.optimizer"), (["show", "STAGE=0"], "show 0"),
    (["bench", "STAGE=9"], "bench.py --json measured/bench.json"),
    (["bench", "WHAT=network", "RATE=9gbit"],
     "-m harness.measuring.two_hosts --rate 9gbit --json measured/network_9gbit.json"),
    *((["bench", f"WHAT={what}", f"ARGS={arguments}"], f"--json measured/{file}.json {arguments}")
      for what, arguments, file in (("rows", "--rows variants", "bench_variants"), ("rows", "--rows stage", "bench"),
                                    ("network", "--rows variants", "network_variants_1gbit"))),
    *((["bench", f"WHAT={what}", "ARGS=--help"], f"-m harness.measuring.{module} --help") for what, module in (
        ("small", "overhead"), ("cuda", "gpu_step"))),
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
        (["--rows", "stage 9"], "stage 9"), (["--json", ""], "--json .: Is a directory"),
        (["--json", "results"], "Is a directory")]),
    "network": (two_hosts.main, [
        (["--rate", "fast"], "--rate fast"), (["--rate", "0gbit"], "--rate 0gbit"),
        (["--rate", "9999999gbit"], "--rate 9999999gbit"), (["--rate", "0.5kbit"], "from 1kbit to 1000gbit"),
        (["--steps", "0"], "--steps"), (["--model", "huge"], "'huge'"),
        (["--rows", "zero"], "--rows 'zero'"), (["--sequence-length", "9999"], "9999"),
        (["--json", "results"], "results: Is a directory"),
        (["--json", "x" * 300], "File name too long")]),
    "plan": (plan.parse, [
        (["--model", "8b"], "argument --model: invalid choice: '8b'"),
        *((["--world", world], f"--world: must be a whole number from 1 to 4096, not {world}")
          for world in ("0", "5000")),
        (["--device-memory", "much"], "--device-memory: must be a number from 0.001 to 1e+06, not much"),
        (["--model", "gpt2", "--tensor-parallel", "2"], "the heads of gpt2 can't be shared out so"),
        (["--model", "tiny", "--sequence-length", "300"], "--sequence-length 300: tiny takes at most 256"),
        *(([option, text], f"{option}: must be a number from 0.001 to 1e+06, not {text}") for text in (
            "0", "inf", "nan", "1e-9", "-1") for option in ("--bucket-cap-mb", "--device-memory")),]),
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


@pytest.mark.waits
@pytest.mark.parametrize("program", [
    "bench.py", "-m show", "-m grade 4", "-m harness.planning.plan",
    *(f"-m harness.measuring.{name}" for name in ("two_hosts", "gpu_step", "overhead")),
    f"-m harness.training.launch 2 {STAGES[2]}/train.py"])
def test_a_program_reads_its_options_before_it_loads_torch(program, tmp_path):
    """In place of a torch that takes seconds to load: one that cannot be loaded."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    wrong = "--levels=9" if "grade" in program else "--modle=9"
    for option, code in (("--help", 0), (wrong, 2)):
        ended = subprocess.run([sys.executable, *program.split(), option], cwd=ROOT, capture_output=True, text=True,
                               env={**os.environ, "PYTHONPATH": str(tmp_path)})
        assert ended.returncode == code, ended.stderr
        assert "usage: " in ended.stdout if code == 0 else len(ended.stderr.splitlines()) == 1


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
                       "second") for rank in ("abc", "1")),
    ({"WORLD_SIZE": "9" * 30}, "RANK=0 and WORLD_SIZE=999"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x and LOCAL_WORLD_SIZE=1 in the environment: they must be numbers"),
    ({"MASTER_PORT": "http"}, "'http'"),
], ids=str)
def test_a_launcher_that_says_what_cannot_be_is_one_line(wrong, message):
    ended = run_alone(ROOT / STAGE_1 / "train.py", "--steps", "1", **{**ENVIRONMENT, **wrong})
    assert ended.code == 2 and ended.stderr.startswith("train.py: error: ") and message in ended.stderr
    assert ended.stderr.endswith(": see torchrun\n") and len(ended.stderr.splitlines()) == 1
