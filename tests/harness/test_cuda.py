"""make bench WHAT=cuda: on the CPU with a tiny model, and what it says and what is known of it without a GPU."""

import contextlib
import functools
import importlib
import itertools
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import STAGE_3, STAGE_4
from harness.measuring import gpu_step, ledger
from harness.publishing import results
from harness.publishing.tables import sheet_text
from harness.training.models import GPT, MODELS
from tests.common import one_rank_of

CPU = torch.device("cpu")


def test_rows_and_bytes_and_what_does_not_fit(monkeypatch):
    """On the processor: how much memory that takes has tests of its own."""
    measure = functools.partial(gpu_step.measure_updates, CPU, ["nano"], n_steps=1)
    rows = measure(ranks=(1, 8))
    assert [(row.stage, row.d) for row in rows] == [
        ("fused AdamW", 1), *((stage, d) for stage in (STAGE_3, STAGE_4) for d in (1, 8))]
    numel = sum(param.numel() for param in GPT(MODELS["nano"]).parameters())
    for row in rows:
        assert row.bytes_per_s * row.step_ms / 1000 * row.d == pytest.approx(28 * numel)
        assert row.allocations == 0 and row.peak_bytes is None
    bytes_per_s = gpu_step.copy_rate(CPU, n_bytes=1024)
    text = sheet_text(gpu_step.update_sheet(rows, bytes_per_s, ""))
    assert "nano: stage4_overlap" in text and max(map(len, text.splitlines())) <= 100 and "…" not in text

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    monkeypatch.setattr(gpu_step, "time_steps", mock.Mock(side_effect=error))
    rows = measure(ranks=(1,))
    assert all("out of memory" in row.error for row in rows)
    assert "out of memory" in sheet_text(gpu_step.update_sheet(rows, bytes_per_s, ""))


def test_without_a_gpu_it_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(tmp_path / "cuda.json")])
    gpu_step.main()
    assert capsys.readouterr().out == "cuda: there is no GPU here: nothing was measured\n"
    assert not (tmp_path / "cuda.json").exists()


@one_rank_of(4)
def test_collectives_are_not_timed(monkeypatch):
    """torch's fake all-gather copies: here it is not called."""
    gathered = torch.zeros(4)

    def step():
        assert dist.all_gather_into_tensor(gathered, torch.ones(1)) is None
        return dist.all_gather_into_tensor(gathered, torch.ones(1), async_op=True).wait()
    monkeypatch.setattr(gpu_step, "seconds_of", lambda function, device: 1.0 if step() else 2.0)
    model = GPT(MODELS["nano"])
    assert gpu_step.time_steps(model, torch.optim.AdamW(model.parameters()), CPU, 1) == (1.0, 0)
    assert gathered.eq(0).all()


@one_rank_of(4)
def test_ranks_agree_on_the_device_of_the_parameters(monkeypatch):
    """Of a group made as "nccl"; on a machine with a GPU and without a name; by both names."""
    refuse, devices = importlib.import_module("guard.refuse"), []
    configs = ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"]
    monkeypatch.setattr(dist, "get_backend_config", lambda group: configs[len(devices)])
    monkeypatch.setattr(refuse, "agree", lambda error, lines, group, device: devices.append((error, str(device))))
    monkeypatch.setattr(refuse, "check_memory", lambda named, takes_channels_last: None)  # fake tensors have none
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.zeros(3, device="cuda:1"))]
        for _ in configs:
            optimizer = mock.Mock(process_group=None, _agreement_group=None, average_over=None, _refuse=list,
                                  make_optimizer=functools.partial(torch.optim.SGD))
            refuse.checked_groups(optimizer, params, {})
    assert devices == [(None, "cuda:1"), (None, "cuda:1"), (None, "cpu")]


def test_a_collective_that_returns_no_work_is_counted(monkeypatch):
    """A synchronous one of NCCL: it is in the stream's queue, and there is nothing to wait for."""
    counted = ledger.Ledger()
    entry = ledger.Collective("all_reduce", 4, torch.float32, 2, "nccl", 4, 0.0)
    boxed = dist.Work().boxed()
    monkeypatch.setattr(dist.Work, "unbox", lambda boxed: None)
    assert counted._watch(entry, boxed) is boxed and entry.completed_at > 0


def test_every_way_sends_what_ddp_sends(monkeypatch):
    """On the CPU, in place of a GPU's streams: which collectives are played, and of how many bytes."""
    stream = mock.Mock(device=CPU)
    sent, n_bytes = {}, sum(param.nbytes for param in GPT(MODELS["nano"]).parameters())
    for name, played in (("Stream", lambda device: stream), ("stream", lambda stream: contextlib.nullcontext()),
                         *((name, mock.Mock()) for name in ("_sleep", "synchronize", "current_stream"))):
        monkeypatch.setattr(torch.cuda, name, played)
    monkeypatch.setattr(torch.futures, "Future", lambda devices, Future=torch.futures.Future: Future())
    monkeypatch.setattr(gpu_step, "SEQUENCE_LENGTH", 32)
    monkeypatch.setattr(gpu_step, "cycles_per_s", lambda: 1e9)
    seconds = itertools.count(1)
    monkeypatch.setattr(gpu_step, "seconds_of", lambda function, device: (function(), next(seconds))[1])

    def profiled(training, link, batch):
        link.carried.clear()
        training.step(batch)
        training.finish()
        sent[len(sent)] = sum(ledger.wire_bytes(kind, size, 8, "nccl") for kind, size in link.carried)
        return results.RecordedStep(0.0, 1.0, [(name, 0.0, 0.1) for name in ("forward", "backward", "step")])
    monkeypatch.setattr(gpu_step, "profiled", profiled)
    rows, _ = gpu_step.measure_overlap(CPU, "nano", n_rounds=1)
    assert [row.name for row in rows] == list(gpu_step.configurations(mock.Mock()))
    alone, ddp, *others = sent.values()
    assert alone == 0 and ddp == 2 * n_bytes * 7 / 8
    assert all(ddp <= other <= 1.03 * ddp for other in others), sent  # and padding
    assert "stage 4 overlap, no prefetch" in sheet_text(gpu_step.overlap_sheet(rows, "nano"))


def test_exposed_is_what_travels_while_no_kernel_computes():
    """Three steps of 100 µs and a mark: 30 forward, 60 backward of which 50 computes, 10 update; 20 travel, 10 of them
    beside the backward pass."""
    kernels = []
    for start in range(0, 400_000, 100_000):
        kernels += [(name, start + 1000 * begins, start + 1000 * ends) for name, begins, ends in [
            ("spin", 0, 1), ("gemm", 1, 30), ("spin", 30, 31), ("gemm", 31, 80), ("spin", 70, 90), ("spin", 90, 91),
            ("adamw", 91, 100)]]
    step = gpu_step.one_step(kernels, [("all_reduce", 8)] * 4)
    assert step.seconds == pytest.approx(100e-6) and step.exposed_seconds == pytest.approx(10e-6)
    assert [name for name, *_ in step.phases] == ["forward", "backward", "step"]
    assert [(one.kind, one.bytes) for one in step.communication] == [("all_reduce", 8)]
