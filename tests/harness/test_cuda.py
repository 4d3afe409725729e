"""make bench WHAT=cuda, and what else a GPU needs, on a machine that has none."""

import contextlib
import functools
import importlib
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.measuring import gpu_step, ledger
from harness.publishing.pictures import RecordedStep
from harness.publishing.tables import sheet_text
from harness.training.models import GPT, MODELS
from tests.common import one_rank_of

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", "--json", str(tmp_path / "cuda.json")])
    gpu_step.main()
    assert capsys.readouterr().out == "cuda: there is no GPU here: nothing was measured\n"
    assert not (tmp_path / "cuda.json").exists()


@one_rank_of(4)
def test_ranks_agree_on_the_device_of_the_parameters(monkeypatch):
    """The ranks agree on the GPU of the parameters if the group's first device is a GPU, or else on the CPU."""
    refuse = importlib.import_module("guard.refuse")
    expected = {"nccl": "cuda:1", "cuda:nccl": "cuda:1", "cpu:gloo,cuda:nccl": "cpu"}  # by the group's backend
    for backend, device in expected.items():
        agree = mock.Mock()
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
        monkeypatch.setattr(refuse, "agree", agree)
        monkeypatch.setattr(refuse, "check_memory", mock.Mock())  # fake tensors have no memory
        with FakeTensorMode():
            params = [torch.nn.Parameter(torch.zeros(3, device="cuda:1"))]
            optimizer = mock.Mock(process_group=None, _agreement_group=None, average_over=None, _refuse=list,
                                  make_optimizer=functools.partial(torch.optim.SGD))
            refuse.checked_groups(optimizer, params, {})
        error, _, _, agreed_device = agree.call_args.args
        assert (error, str(agreed_device)) == (None, device)


def test_a_collective_that_returns_no_work_is_counted(monkeypatch):
    """A synchronous collective of NCCL returns no work: the ledger has nothing to wait for."""
    counted = ledger.Ledger()
    entry = ledger.Collective("all_reduce", 4, torch.float32, 2, "nccl", 4, 0.0)
    boxed = dist.Work().boxed()
    monkeypatch.setattr(dist.Work, "unbox", lambda boxed: None)
    assert counted._watch(entry, boxed) is boxed and entry.completed_at > 0


def test_every_row_sends_what_ddp_sends(monkeypatch):
    """Play the collectives of all rows on the CPU, without streams, and count the bytes. Padding may add 3 %."""
    for name, played in (("Stream", lambda device: mock.Mock(device=CPU)),
                         ("stream", lambda stream: contextlib.nullcontext()), ("_sleep", mock.Mock()),
                         ("synchronize", mock.Mock()), ("current_stream", mock.Mock())):
        monkeypatch.setattr(torch.cuda, name, played)
    cpu_future = torch.futures.Future
    monkeypatch.setattr(torch.futures, "Future", lambda devices: cpu_future())
    for name, value in (("MODEL", "nano"), ("SEQUENCE_LENGTH", 32), ("ROUNDS", 1)):
        monkeypatch.setattr(gpu_step, name, value)
    sent = []

    def recorded_by_profiler(training, link, batch):
        link.carried = []
        training.step(batch)
        training.finish()
        sent.append(sum(ledger.wire_bytes(kind, size, 8, "nccl") for kind, size in link.carried))
        return RecordedStep(0.0, 1.0, [(name, 0.0, 0.1) for name in gpu_step.PHASES], [], [])

    monkeypatch.setattr(gpu_step, "recorded_by_profiler", recorded_by_profiler)
    rows = gpu_step.measure_overlap(CPU)
    alone, ddp, *others = sent
    n_bytes = sum(param.nbytes for param in GPT(MODELS["nano"]).parameters())
    assert alone == 0 and ddp == 2 * n_bytes * 7 / 8
    assert len(others) == 5 and all(ddp <= other <= 1.03 * ddp for other in others), sent
    assert "stage 4 overlap, no prefetch" in sheet_text(gpu_step.overlap_sheet(rows))


def test_exposed_is_what_travels_while_no_kernel_computes():
    """A step of 100 µs has 30 µs of forward, 60 of backward and 10 of update. A message travels from 70 to 90.

    Kernels compute until 80, so 10 µs are exposed. The step is recorded four times.
    """
    kernels = []
    for start in range(0, 400_000, 100_000):
        for name, begins, ends in (("spin", 0, 1), ("gemm", 1, 30), ("spin", 30, 31), ("gemm", 31, 80),
                                   ("spin", 70, 90), ("spin", 90, 91), ("adamw", 91, 100)):
            kernels.append((name, start + 1000 * begins, start + 1000 * ends))
    step = gpu_step.shown_step(kernels, [("all_reduce", 8)] * 4)
    assert step.seconds == pytest.approx(100e-6) and step.exposed_seconds == pytest.approx(10e-6)
    assert [name for name, *_ in step.phases] == ["forward", "backward", "step"]
    assert [(message.kind, message.bytes) for message in step.communication] == [("all_reduce", 8)]
