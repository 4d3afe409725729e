"""What a user may write by mistake: one line that says what is possible, exit code 2, and nothing has begun."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import bench
from harness import STAGE_1
from harness.measuring import two_hosts
from harness.planning import plan
from harness.publishing.tables import Made, Report, from_json, name_column, save_and_show, sheet_of
from harness.training import train
from tests.checkpoint import full_disk
from tests.common import STAGES
from tests.ranks import ROOT, run_alone


def make(*arguments):
    """Run make so that it prints the commands, and doesn't run them."""
    return subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, env={**os.environ, "LC_ALL": "C"},
                          capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("arguments, message", [
    (["grade", "STAGE=nowhere"], "STAGE=nowhere: there are stages 1 to 4, and no package of that name here"),
    (["show", "STAGE=5"], "STAGE=5: there are stages 0 to 4, and no package of that name here"),
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
    """PYTHON is left out, so after a mistake that is not seen make would print `python3 -m venv`."""
    ended = make(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "") and f"*** {message}.  Stop." in ended.stderr


@pytest.mark.parametrize("arguments, command", [
    (["train", "STAGE=3", "NPROC=256"], "-m harness.training.launch 256 stage3_gradbuffer/train.py"),
    (["diff", "A=2"], f"{STAGES[1]}/optimizer.py {STAGES[2]}/optimizer.py"),
    (["diff"], f"{STAGES[0]}/optimizer.py {STAGES[1]}/optimizer.py"),
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


def test_make_diff_shows_what_changes_in_the_files_of_a_core_and_in_no_other_file(tmp_path):
    """In a folder without .git, as a download is. From stage 1 to 2 only `sync_params` and the docstring change."""
    for stage in STAGES:
        (tmp_path / stage).symlink_to(ROOT / stage)
    texts = [subprocess.check_output(["make", "-f", ROOT / "Makefile", "diff", f"A={stage}"], cwd=tmp_path, text=True)
             for stage in (1, 3)]
    assert re.findall(r"^[-+]{3} .*/(\w+)", "".join(texts), re.MULTILINE) == [
        *["optimizer"] * 4, "buffer", "buffer", "null", "transport"]
    assert re.findall(r"^.(?:    )?def (\w+)", texts[0], re.MULTILINE) == ["sync_params", "step"]  # step: a line below


OPTIONS = {  # program -> its main, and what is wrong: options, and words of the line that says so
    "train.py": (lambda: train.parse_args(""), [
        (["--model", "huge"], "huge"),
        (["--steps", "9" * 30], "--steps: must be a whole number from 1 to 1e+06, not 999"),
        (["--timeout", "0"], "--timeout: must be a number from 0.001 to 1e+06, not 0"),
        (["--clip", "nan"], "--clip"),
        (["--sequence-length", "100000"], "--sequence-length: 100000 is too long, model tiny takes at most 256"),
        (["--checkpoint", ""], "--checkpoint: it names no folder"),
        (["--save-every", "2"], "--save-every: there is no --checkpoint DIR to save in")]),
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
        (["--world", "5000"], "--world: must be a whole number from 1 to 4096, not 5000"),
        (["--model", "gpt2", "--tensor-parallel", "2"], "the heads of gpt2 can't be shared out so"),
        (["--model", "tiny", "--sequence-length", "300"], "--sequence-length 300: tiny takes at most 256")]),
}


@pytest.mark.parametrize("program", OPTIONS)
def test_a_wrong_option_is_one_line(program, monkeypatch, capsys, tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")  # a program tries to write where it will have to write
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
    """In place of torch there is a module that cannot be loaded."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    wrong = "--levels=9" if "grade" in program else "--modle=9"
    for option, code in (("--help", 0), (wrong, 2)):
        ended = subprocess.run([sys.executable, *program.split(), option], cwd=ROOT, capture_output=True, text=True,
                               env={**os.environ, "PYTHONPATH": str(tmp_path)})
        assert ended.returncode == code, ended.stderr
        assert "usage: " in ended.stdout if code == 0 else len(ended.stderr.splitlines()) == 1


def test_a_result_is_printed_also_where_it_cannot_be_written(tmp_path, capsys):
    """Save where the disk is full: the program fails in one line, and has printed the table. Then save with space."""
    def fail(message):
        raise ValueError(message)

    path = tmp_path / "[a].json"  # rich would take [a] for markup
    sheet = sheet_of("A table", ["a row"], {"name": name_column(str)})
    report = Report(Made("machine", "2", "abc", "today"), {"key": sheet})
    with full_disk(100), pytest.raises(ValueError, match="^--json .*: not written: File too large$"):
        save_and_show(path, report, fail)
    assert "a row" in capsys.readouterr().out
    save_and_show(path, report, fail)
    assert from_json(path.read_text()) == report and f"written to {path}\n" in capsys.readouterr().out


@pytest.mark.parametrize("wrong, message", [({"RANK": "abc"}, "'abc'"), ({"MASTER_PORT": "http"}, "'http'")], ids=str)
def test_a_launcher_that_says_what_cannot_be_is_one_line(wrong, message):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **wrong}
    ended = run_alone(ROOT / STAGE_1 / "train.py", "--steps", "1", **environment)
    assert ended.code == 2 and ended.stderr.startswith("train.py: error: ") and message in ended.stderr
    assert ended.stderr.endswith(": see torchrun\n") and len(ended.stderr.splitlines()) == 1
