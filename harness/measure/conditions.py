"""Under which conditions a figure holds: machine, code, settings."""

import platform
import subprocess
from datetime import date
from pathlib import Path

import torch

from harness.measure.examine import tolerance
from harness.measure.setup import WARMUP_STEPS, make_batches, make_model
from harness.rows.results import Conditions
from harness.run.workers import on_rank_0


def describe(rank, settings):
    """-> the Conditions under which the figures hold, of one host."""
    numel = sum(param.numel() for param in make_model(settings, rank, "float32").parameters())
    make_batches(settings, rank)
    on_gpu = rank.device.type == "cuda"
    machine = torch.cuda.get_device_name(rank.device) if on_gpu else _cpu_name()
    return Conditions(
        machine=machine, torch=torch.__version__, python=platform.python_version(), backend=rank.backend,
        device=rank.device.type, gpus=torch.cuda.device_count() if on_gpu else 0, ranks=rank.world_size,
        threads_per_rank=torch.get_num_threads(), **settings._asdict(), parameters=numel, warmup_steps=WARMUP_STEPS,
        tolerance=tolerance(rank.world_size), commit=commit(), date=date.today().isoformat())


def commit(folder=Path(__file__).parents[2]):
    """Of which code a figure is -> "abc1234"; with a + where the code has changed since; outside of git "unknown"."""
    def git(*command):
        return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout
    try:
        code = "--", "*.py", "Makefile"  # results and pages may be in the making
        changed = git("status", "--porcelain", "--untracked-files=no", *code)
        return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_type(rank):
    return rank.device.type


def default_model(workers):
    """The one whose step takes long enough to show something there."""
    return "medium" if on_rank_0(workers, device_type) == "cuda" else "tiny"


def _cpu_name():
    """The processor's name, as Linux knows it, or else the little that Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()
