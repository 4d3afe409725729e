"""Runs the samples of docs/frameworks.md with the real libraries, `pip install '.[frameworks]'`.

A sample is a ```diff from a program with DDP to a sharded one. In each step both print a line "loss …" with figures,
which must agree.
"""

import functools
import importlib.util
import re
import shutil
from multiprocessing import forkserver

import pytest

from tests.common import STAGES
from tests.ranks import ROOT, run_ranks

LIBRARIES = ["accelerate", "lightning", "peft", "safetensors", "transformers"]
missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.waits,
              pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: pip install '.[frameworks]'")]

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
SAMPLES = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
RESUMES = ["accelerate", "Hugging Face Trainer", "Lightning", "Fabric"]
IMPORTED = ["transformers.models.gpt2.modeling_gpt2", "transformers.trainer", "accelerate", "lightning",
            "lightning.fabric.strategies", "lightning.pytorch.strategies", "peft"]


def program(sample, kind):
    """Return one side of a sample's diff. `kind`: "+" for the sharded program, "-" for that with DDP."""
    lines = [line for line in SAMPLES[sample].splitlines() if line[:1] in ("", " ", kind)]
    return "".join(line[1:] + "\n" for line in lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Give `run(code, folder, n_ranks)`: it runs a program in that folder, and returns what it printed in each step.

    `run.with_ddp(sample)` returns that of the sample's program with DDP, which is run only once. Ranks are forked from
    a process that has imported the libraries, because importing takes seconds.
    """
    home = tmp_path_factory.mktemp("home")
    for path in [*(ROOT / name for name in [*STAGES, "guard", "checkpoint"]), ROOT / "tests/frameworks/tiny.py"]:
        (home / path.name).symlink_to(path)

    def run(code, folder, n_ranks=2):
        (home / "program.py").write_text(code)
        ranks = run_ranks(n_ranks, home / "program.py", home / folder, cwd=home)
        assert all(ended.code == 0 for ended in ranks), [ended.stderr[-3000:] for ended in ranks]
        lines = re.findall(r"^loss (.*)$", ranks[0].stdout, re.MULTILINE)
        return [tuple(map(float, line.split())) for line in lines]

    run.home, run.with_ddp = home, functools.cache(lambda sample: run(program(sample, "-"), f"{sample} ddp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        server = forkserver.ForkServer()
        server.set_forkserver_preload(["torch._dynamo", *IMPORTED])
        patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
        yield run
        server._stop()


def close(figures, expected, rel=1e-6):
    return figures == [pytest.approx(step, rel=rel) for step in expected] and len(expected) > 1


def remove_last_checkpoints(folder):
    """Pretend that the run was killed before it saved step 8."""
    for path in [*folder.glob("checkpoint-8"), *folder.glob("*step=8.ckpt")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_trains_as_with_ddp(run, sample):
    """Train on two ranks; if the sample saves, resume in the middle on three ranks."""
    assert len(SAMPLES) == 6 and program(sample, "+") != program(sample, "-")
    ddp, folder = run.with_ddp(sample), f"{sample} sharded"
    sharded = run(program(sample, "+"), folder)
    assert close(sharded, ddp)
    if sample.startswith("The shortest way"):
        assert sharded == ddp
    if sample in RESUMES:
        remove_last_checkpoints(run.home / folder)
        if sample == "Lightning":  # it begins with the first batch again, so DDP must resume, too
            remove_last_checkpoints(run.home / f"{sample} ddp")
            ddp = ddp + run(program(sample, "-"), f"{sample} ddp")
        resumed = run(program(sample, "+"), folder, n_ranks=3)
        half = len(sharded) // 2
        assert close(resumed[-half:], ddp[-half:], rel=1e-5) and len(resumed) in (half, 2 * half)


@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("sample", [*RESUMES, "PEFT"])
def test_a_sample_trains_as_with_ddp_in_the_other_stages(run, sample, stage):
    lines = program(sample, "+").replace("stage4_overlap", stage).splitlines(keepends=True)
    code = "".join(line for line in lines if "prefetch_params" not in line)
    assert close(run(code, f"{sample} {stage}"), run.with_ddp(sample))
