"""The samples of docs/frameworks.md against the real libraries: as they were, with DDP, and as they become.

A sample is a ```diff: without what it adds it is the program with DDP, without what it removes the sharded one. Both
print a line "loss …" a step, of figures, which must agree. Libraries: `pip install '.[frameworks]'`.
"""

import importlib.util
import re
import shutil

import pytest

from tests.common import STAGES
from tests.ranks import ROOT, imported_already, run_ranks

LIBRARIES = ["accelerate", "lightning", "peft", "safetensors", "transformers"]
missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.waits,
              pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: pip install '.[frameworks]'")]

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
SAMPLES = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
RESUMES = ["accelerate", "Hugging Face Trainer", "Lightning", "Fabric", "A loop like nanoGPT's"]
FIGURES = {}  # sample -> those of its program with DDP, once it has run
IMPORTED = ["transformers.models.gpt2.modeling_gpt2", "transformers.trainer", "accelerate", "lightning",
            "lightning.fabric.strategies", "lightning.pytorch.strategies", "peft", "torch.optim.swa_utils"]


def program(sample, kind):
    """`kind`: "+" the sharded program, "-" that with DDP."""
    lines = [line for line in SAMPLES[sample].splitlines() if line[:1] in ("", " ", kind)]
    return "".join(line[1:] + "\n" for line in lines)


@pytest.fixture(scope="module")
def libraries():
    """In the process that ranks are forked from: a rank would take seconds to import them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with imported_already(*IMPORTED):
            yield


@pytest.fixture
def run(libraries, tmp_path):
    """`run(code, folder, n_ranks)` -> [figures of a step, …], which the program printed. It trains in that folder."""
    for name in [*STAGES, "guard", "checkpoint"]:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tiny.py").symlink_to(ROOT / "tests" / "frameworks" / "tiny.py")

    def run(code, folder, n_ranks=2):
        (tmp_path / "program.py").write_text(code)
        ranks = run_ranks(n_ranks, tmp_path / "program.py", tmp_path / folder, cwd=tmp_path)
        assert all(ended.code == 0 for ended in ranks), [ended.stderr[-3000:] for ended in ranks]
        lines = re.findall(r"^loss (.*)$", ranks[0].stdout, re.MULTILINE)
        return [tuple(map(float, line.split())) for line in lines]

    run.folder = tmp_path
    return run


@pytest.fixture
def with_ddp(run):
    """`with_ddp(sample)` -> the figures of its program with DDP, which runs once for all tests here."""
    def with_ddp(sample):
        if sample not in FIGURES:
            FIGURES[sample] = run(program(sample, "-"), "ddp")
        return list(FIGURES[sample])
    return with_ddp


def close(figures, expected, rel=1e-6):
    return len(figures) == len(expected) > 1 and all(
        one == pytest.approx(other, rel=rel) for one, other in zip(figures, expected))


def forget_the_end(folder):
    """As if the run had been killed before its last checkpoint."""
    for path in [*folder.glob("checkpoint-8"), *folder.glob("*step=8.ckpt")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_trains_as_with_ddp(run, with_ddp, sample):
    """On two ranks; then, where it saves, from the middle on three."""
    ddp = with_ddp(sample)
    assert len(ddp) > 1
    sharded = run(program(sample, "+"), "sharded")
    assert close(sharded, ddp)
    if sample.startswith("The shortest way"):
        assert sharded == ddp
    if sample in RESUMES:
        for folder in ("sharded", "ddp"):
            forget_the_end(run.folder / folder)
        if sample == "Lightning":  # which begins the data anew
            ddp += run(program(sample, "-"), "ddp")
        resumed = run(program(sample, "+"), "sharded", n_ranks=3)
        half = len(sharded) // 2
        assert close(resumed[-half:], ddp[-half:], rel=1e-5) and len(resumed) in (half, 2 * half)


@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("sample", [*RESUMES, "PEFT", "EMA and SWA"])
def test_a_sample_trains_so_with_the_other_stages(run, with_ddp, sample, stage):
    code = program(sample, "+").replace("stage4_overlap", stage)
    code = "".join(line for line in code.splitlines(keepends=True) if "prefetch_params" not in line)
    assert close(run(code, "sharded"), with_ddp(sample))


def test_the_page_has_samples():
    assert set(RESUMES) < set(SAMPLES) and len(SAMPLES) == 8
    assert all("+" in sample for sample in SAMPLES.values())
