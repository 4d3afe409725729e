"""Runs the samples of docs/frameworks.md with the real libraries, `pip install '.[frameworks]'`.

A sample is a ```diff from a program with DDP to a sharded one. In each step both print a line "loss …" with figures,
which must agree.
"""

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
def home(tmp_path_factory):
    """Give a folder in which programs find this project and tiny.py.

    Ranks are forked from a process that has imported the libraries, because importing takes seconds.
    """
    home = tmp_path_factory.mktemp("home")
    for path in [*(ROOT / name for name in [*STAGES, "guard", "checkpoint"]), ROOT / "tests/frameworks/tiny.py"]:
        (home / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        server = forkserver.ForkServer()
        server.set_forkserver_preload(["torch._dynamo", *IMPORTED])
        patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
        yield home
        server._stop()


def run(home, code, folder, n_ranks=2):
    """Run a program, which saves in this folder of `home`. Return the figures that it printed in each step."""
    (home / "program.py").write_text(code)
    ranks = run_ranks(n_ranks, home / "program.py", home / folder, cwd=home)
    assert all(ended.code == 0 for ended in ranks), [ended.stderr[-3000:] for ended in ranks]
    lines = re.findall(r"^loss (.*)$", ranks[0].stdout, re.MULTILINE)
    return [tuple(map(float, line.split())) for line in lines]


def are_close(figures, expected, rel=1e-6):
    return figures == [pytest.approx(step, rel=rel) for step in expected] and len(expected) > 1


def remove_last_checkpoints(folder):
    """Pretend that the run was killed before it saved step 8."""
    for path in [*folder.glob("checkpoint-8"), *folder.glob("*step=8.ckpt")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_trains_as_with_ddp(home, sample):
    """Train on two ranks; if the sample saves, resume in the middle on three ranks.

    tests/stages/test_wrappers.py has wrappers of the same kinds in every stage.
    """
    with_ddp, sharded = program(sample, "-"), program(sample, "+")
    assert len(SAMPLES) == 6 and with_ddp != sharded
    of_ddp = run(home, with_ddp, f"ddp {sample}")
    of_sharded = run(home, sharded, sample)
    assert are_close(of_sharded, of_ddp)
    if sample.startswith("The shortest way"):
        assert of_sharded == of_ddp
    if sample in RESUMES:
        remove_last_checkpoints(home / sample)
        if sample == "Lightning":  # it begins with the first batch again, so DDP must resume, too
            remove_last_checkpoints(home / f"ddp {sample}")
            of_ddp = run(home, with_ddp, f"ddp {sample}")
        resumed = run(home, sharded, sample, n_ranks=3)
        half = len(of_sharded) // 2
        assert len(resumed) in (half, 2 * half)
        assert are_close(resumed[-half:], of_ddp[-half:], rel=1e-5)
