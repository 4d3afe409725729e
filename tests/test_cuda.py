"""make cuda: its functions on the CPU with a tiny model, and what it says where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import gpu, report

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def test_rows_and_bytes():
    """At the peak there are at least parameters and moments: 12 bytes a parameter, 4 + 8/d with d ranks."""
    result = gpu.measure(CPU, models=["nano"], ranks=(1, 8), n_steps=1, copied_bytes=1024)
    assert [(row["stage"], row["d"]) for row in result["rows"]] == [
        ("fused AdamW", 1), *((stage, d) for stage in gpu.STAGES for d in (1, 8))]
    numel = sum(param.numel() for param in gpu.workload.GPT(gpu.workload.MODELS["nano"]).parameters())
    for row in result["rows"]:
        assert row["bytes_per_s"] * row["step_ms"] / 1000 * row["d"] == pytest.approx(28 * numel)
        assert row["peak_bytes"] >= (4 + 8 / row["d"]) * numel and row["allocations"] == 0
    text = report.sheet_text(gpu.sheet(result))
    assert "nano: stage4_overlap" in text and max(map(len, text.splitlines())) <= 100 and "…" not in text


def test_an_out_of_memory_is_a_result(monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    monkeypatch.setattr(gpu, "time_steps", fails)
    result = gpu.measure(CPU, models=["nano"], ranks=(1,), copied_bytes=1024)
    assert all("out of memory" in row["error"] for row in result["rows"])
    assert "out of memory" in report.sheet_text(gpu.sheet(result))


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    run = subprocess.run([sys.executable, "-m", "harness.gpu", "--json", str(tmp_path / "cuda.json")], cwd=ROOT,
                         capture_output=True, text=True, timeout=60, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 0 and run.stdout == "cuda: there is no GPU here: nothing was measured\n"
    assert not (tmp_path / "cuda.json").exists()
