"""Ranks end, whatever happens: a failure, a death, a wait that is too long, Ctrl-C."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import meeting
from harness.workers import WorkerError, Workers, event
from tests.ranks import ROOT, hears_ctrl_c

pytestmark = pytest.mark.waits


def add(rank, a, b):
    total = torch.tensor(float(a + b + rank.rank), device=rank.device)
    dist.all_reduce(total)
    return total.item(), os.getpid()


def fails_on_rank_1(rank, how):
    event({"pid": os.getpid()})
    if rank.rank == 1 and how == "raise":
        raise ValueError("the loss is nan")
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    dist.barrier()  # the others wait here for a rank that never comes


def gone(pid, limit_s=0):
    """Whether a process has ended, within this time; Linux only."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    return bool(select.select([ended], [], [], limit_s)[0])


def test_ranks_are_started_once_and_reused():
    with Workers(2, timeout_s=300) as workers:
        first, second = workers.run(add, 1, b=2), workers.run(add, 3, b=4)
    assert [total for total, pid in first] == [7.0, 7.0] and [total for total, pid in second] == [15.0, 15.0]
    assert [pid for total, pid in first] == [pid for total, pid in second]
    assert all(gone(pid) for total, pid in first)


@pytest.mark.parametrize(
    "how, message, timeout_s",
    [("raise", "rank 1: ValueError: the loss is nan", 60), ("kill", "rank 1 .*signal 9", 60), ("hang", "rank", 5)],
)
def test_a_rank_that_fails_ends_the_others_and_says_so_in_one_line(how, message, timeout_s):
    with Workers(3, timeout_s=timeout_s) as workers:
        pids = [process.pid for process in workers.processes]
        with pytest.raises(WorkerError, match=message) as error:
            workers.run(fails_on_rank_1, how)
        assert "\n" not in str(error.value)
        assert len(pids) == 3 and all(gone(pid) for pid in pids)
        workers.timeout_s = 60
        assert workers.run(add, 1, 1)[0][0] == 9.0  # the next run starts new ranks


INTERRUPTED = """
from harness.workers import Workers
from tests.harness.test_launch import fails_on_rank_1
if __name__ == "__main__":
    with Workers(2) as workers:
        workers.run(fails_on_rank_1, "hang", on_event=lambda rank, event: print(event["pid"], flush=True))
"""


def test_ctrl_c_ends_every_rank(tmp_path):
    """The ranks write their process ids, then wait in a collective; the parent is interrupted."""
    script = tmp_path / "program.py"
    script.write_text(INTERRUPTED)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=hears_ctrl_c)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode != 0 and all(gone(pid) for pid in pids)


CPU, OWN, SHARED = ("gloo", "cpu"), ("nccl", "cuda:1"), "cuda:0"


@pytest.mark.parametrize(
    "n_gpus, share, expected, host",
    [(2, None, [OWN], None), (4, "no", [OWN], None), (0, None, [CPU], None), (1, "no", [CPU], None),
     (1, None, [("nccl", SHARED), ("gloo", SHARED), CPU], "here rank 1")],
)
def test_backend_and_device_of_rank_1_of_2(monkeypatch, n_gpus, share, expected, host):
    """A GPU each, or everything on the CPU; with one GPU for both, whichever way to share it works first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(meeting.platform, "node", lambda: "here")
    for name, value in (("SHARE_GPU", share), ("NCCL_HOSTID", "")):
        monkeypatch.setenv(name, value or "")
    assert meeting.choices(1, 2) == [(backend, torch.device(device)) for backend, device in expected]
    assert os.environ["NCCL_HOSTID"] == (host or "")


def knows_no_meta_device(rank):
    """gloo doesn't know the device of the first choice and the last."""
    meta = torch.device("meta")
    meeting.choices = lambda *_: [("gloo", meta), ("gloo", torch.device("cpu")), ("gloo", meta)]


def where(rank):
    return rank.device.type, rank.backend


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_first_choice_that_works_is_taken(world_size):
    with Workers(world_size, timeout_s=300, enter=knows_no_meta_device) as workers:
        assert workers.run(where) == [("cpu", "gloo")] * world_size


def test_threads_of_a_rank(monkeypatch):
    """As OpenMP reads it: the first of a list, and nothing of what is no number."""
    found, written = [], ["", "2", "2,1", "0", "-2", "x"]
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    for text in written:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        meeting.prepare(torch.device("cpu"))
    assert found == [1, 2, 2, 1, 1, 1]


def is_told_nothing(rank):
    os.environ.pop("GLOO_PRIORITY", None)


def is_told_normal(rank):
    os.environ["GLOO_PRIORITY"] = "normal"


def policies(rank):
    """-> own niceness, and (policy, niceness) of each thread of gloo."""
    dist.all_reduce(torch.ones(1), group=meeting.beside(30))
    gloo = [int(path.parent.name) for path in Path("/proc/self/task").glob("*/comm") if "gloo" in path.read_text()]
    return os.nice(0), [(os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)) for thread in gloo]


@pytest.mark.parametrize("enter", [is_told_nothing, is_told_normal])
def test_what_computes_goes_before_threads_of_gloo(enter):
    """On Linux, and unless it is told not to; elsewhere a thread has no policy of its own."""
    with Workers(2, enter=enter) as workers:
        for nice, threads in workers.run(policies):
            expected = (os.SCHED_BATCH, min(nice + 10, 19)) if enter is is_told_nothing else (os.SCHED_OTHER, nice)
            assert len(threads) >= 2 or not Path("/proc/self/task").exists()
            assert set(threads) <= {expected}


ENDS = """
import atexit, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harness import meeting

@atexit.register  # what is registered first comes last
def count_threads():
    print(sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm")))

def main():
    meeting.connect(timeout_s=30)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    torch.distributed.all_reduce(torch.ones(1), group=meeting.beside(30))
    count_threads()
    meeting.disconnect()

main()
"""


def test_no_thread_of_gloo_is_left_when_python_ends():
    """Python aborts, "terminate called without an active exception", if one of them asks for the GIL then."""
    run = subprocess.run([sys.executable, "-c", ENDS, ROOT], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    before, at_the_end = map(int, run.stdout.split())
    assert at_the_end == 0 and (before or not Path("/proc/self/task").exists())


@pytest.mark.parametrize("module", ["bench", "harness.timeline", "harness.gpu_step", "harness.pages"])
def test_ctrl_c_is_one_word_even_while_torch_is_loaded(module, tmp_path):
    """In place of a torch that takes seconds to load: one during which somebody presses Ctrl-C."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "rich.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = subprocess.run([sys.executable, "-m", module], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
                         capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")


def test_an_import_of_the_harness_changes_no_hook_and_no_stream():
    check = ("import sys; before = sys.excepthook, sys.stdout.errors; import harness.timeline, harness.meeting, bench;"
             "assert before == (sys.excepthook, sys.stdout.errors)")
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=300)


def test_ctrl_c_is_one_word_for_a_rank(capsys):
    """report_lost_rank is the excepthook of a rank: Ctrl-C reaches it too."""
    with pytest.raises(SystemExit) as end:
        meeting.report_lost_rank(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert (end.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_ranks_end_when_torchrun_is_killed(tmp_path):
    """By SIGKILL, which gives it no moment to end them: they would train on, beside the run that comes after."""
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nfrom harness.meeting import connect\nconnect()\n"
                      "os.write(1, f'{os.getpid()}\\n'.encode())  # print may write the line in two\nsignal.pause()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as torchrun:
        ranks = [int(torchrun.stdout.readline()) for _ in range(2)]
        torchrun.kill()
    try:
        assert all(gone(rank, limit_s=300) for rank in ranks)
    finally:
        for rank in ranks:
            if not gone(rank):
                os.kill(rank, signal.SIGKILL)
