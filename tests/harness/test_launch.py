"""Ranks end, whatever happens: a failure, a death, a wait that is too long, Ctrl-C."""

import atexit
import functools
import operator
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.ranks import meeting
from harness.ranks.workers import WorkerError, Workers, event
from tests.common import STAGES
from tests.ranks import ROOT, hears_ctrl_c

pytestmark = pytest.mark.waits


def sum_of_ranks(rank):
    total = torch.tensor(float(rank.number), device=rank.device)
    dist.all_reduce(total)
    return total.item()


def fails_on_rank_1(rank, how):
    event({"pid": os.getpid()})
    if rank.number == 1 and how == "raise":
        raise ValueError("the loss is nan")
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    dist.barrier()  # the others wait here for a rank that never comes


def has_ended(pid):
    """Return whether a process has ended. Linux only."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([process], [], [], 0)
    return bool(ended)


def start(*command, cwd=ROOT, path=ROOT, **kwargs):
    """Start python with such arguments, which finds modules in `path`."""
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=cwd, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(path)}, **kwargs)


@pytest.mark.parametrize("how, message, timeout_s", [
    ("raise", "rank 1: ValueError: the loss is nan", 60), ("kill", "rank 1 .*signal 9", 60), ("hang", "rank", 5)])
def test_a_rank_that_fails_ends_the_others_and_says_so_in_one_line(how, message, timeout_s):
    """After a failure no process is left, and the next run starts new ranks."""
    with Workers(3, timeout_s=timeout_s) as workers:
        pids = [process.pid for process in workers.processes]
        with pytest.raises(WorkerError, match=message) as error:
            workers.run(fails_on_rank_1, how)
        assert "\n" not in str(error.value)
        assert len(pids) == 3 and all(map(has_ended, pids))
        workers.timeout_s = 60
        assert workers.run(sum_of_ranks) == [3.0] * 3


def hang():
    """Let the ranks write their process ids, then wait in a collective."""
    with Workers(2) as workers:
        workers.run(fails_on_rank_1, "hang", on_event=lambda rank, event: print(event["pid"], flush=True))


def test_ctrl_c_ends_every_rank():
    process = start("-c", "from tests.harness.test_launch import hang; hang()", preexec_fn=hears_ctrl_c)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode != 0 and all(map(has_ended, pids))


ON_CPU = ("gloo", "cpu")
ON_OWN_GPU = ("nccl", "cuda:1")
ON_SHARED_GPU = ("nccl", "cuda:0")


@pytest.mark.parametrize("n_gpus, share, expected", [
    (2, "", [ON_OWN_GPU]), (4, "no", [ON_OWN_GPU]), (0, "", [ON_CPU]), (1, "no", [ON_CPU]),
    (1, "", [ON_SHARED_GPU, ON_CPU])])
def test_backend_and_device_of_rank_1_of_2(monkeypatch, n_gpus, share, expected):
    """Each rank has a GPU, or everything is on the CPU. With one GPU for both ranks they try to share it first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("SHARE_GPU", share)
    assert meeting.choices(1, 2) == [(backend, torch.device(device)) for backend, device in expected]


def knows_no_meta_device(rank):
    """Let the ranks choose among devices of which gloo doesn't know the first and the last."""
    meta = torch.device("meta")
    meeting.choices = lambda *_: [("gloo", meta), ("gloo", torch.device("cpu")), ("gloo", meta)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_first_choice_that_works_is_taken(world_size):
    with Workers(world_size, timeout_s=300, enter=knows_no_meta_device) as workers:
        assert workers.run(operator.attrgetter("device.type", "backend")) == [("cpu", "gloo")] * world_size


def is_told(priority, rank):
    os.environ["GLOO_PRIORITY"] = priority


def threads_of_gloo():
    """Return the ids of gloo's threads; none where there is no /proc."""
    return [int(path.parent.name) for path in Path("/proc/self/task").glob("*/comm") if "gloo" in path.read_text()]


def policies(rank):
    """Return the niceness of this process, and (policy, niceness) of each thread of gloo."""
    dist.all_reduce(torch.ones(1), group=meeting.side_group(30))
    return os.nice(0), [(os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread))
                        for thread in threads_of_gloo()]


@pytest.mark.parametrize("priority", ["", "normal"])
def test_what_computes_goes_before_threads_of_gloo(priority):
    """On Linux gloo's threads have the policy of a batch job, unless GLOO_PRIORITY is "normal"."""
    with Workers(2, enter=functools.partial(is_told, priority)) as workers:
        for nice, threads in workers.run(policies):
            expected = (os.SCHED_OTHER, nice) if priority else (os.SCHED_BATCH, min(nice + 10, 19))
            assert len(threads) >= 2 or not Path("/proc/self/task").exists()
            assert set(threads) <= {expected}


def counts_threads_until_it_ends():
    atexit.register(lambda: print(len(threads_of_gloo())))  # what is registered first comes last
    meeting.connect(timeout_s=30)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.all_reduce(torch.ones(1), group=meeting.side_group(30))
    print(len(threads_of_gloo()))
    meeting.disconnect()
    del model  # it has outlived the group


def test_no_thread_of_gloo_is_left_when_python_ends():
    """Python aborts, "terminate called without an active exception", if such a thread asks for the GIL then."""
    process = start("-c", "from tests.harness import test_launch; test_launch.counts_threads_until_it_ends()")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    before, at_the_end = map(int, stdout.split())
    assert at_the_end == 0 and (before or not Path("/proc/self/task").exists())


@pytest.mark.parametrize("module", [
    "bench", "harness.measuring.two_hosts", "harness.measuring.gpu_step", "harness.publishing.pages"])
def test_ctrl_c_is_one_word_even_while_torch_is_loaded(module, tmp_path):
    """In place of torch and rich there are modules during which somebody presses Ctrl-C."""
    for name in ("torch.py", "rich.py"):
        (tmp_path / name).write_text("raise KeyboardInterrupt")
    process = start("-m", module, cwd=tmp_path, path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (process.communicate(timeout=300)[1], process.returncode) == ("interrupted\n", 130)


def test_an_import_of_the_harness_changes_no_hook_and_no_stream_and_ctrl_c_is_one_word_for_a_rank():
    """report_lost_rank is the excepthook of a rank: Ctrl-C reaches it too."""
    process = start("-c", "import sys; before = sys.excepthook, sys.stdout.errors;"
                    "import bench, harness.measuring.two_hosts;"
                    "assert before == (sys.excepthook, sys.stdout.errors);"
                    "harness.ranks.meeting.report_lost_rank(KeyboardInterrupt, KeyboardInterrupt(), None)")
    assert (process.communicate(timeout=300)[1], process.returncode) == ("interrupted\n", 130)


def test_ranks_end_when_torchrun_is_killed():
    """By SIGKILL, which gives it no moment to end them: they would train on, beside the run that comes after."""
    waits = ("import os, signal, harness.ranks.meeting; harness.ranks.meeting.connect();"
             "os.write(1, f'{os.getpid()}\\n'.encode()); signal.pause()")  # print may write the line in two
    with start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python",
               sys.executable, "-c", waits) as torchrun:
        ranks = [int(torchrun.stdout.readline()) for _ in range(2)]
        torchrun.kill()
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not all(map(has_ended, ranks)):
        time.sleep(0.1)
    left_over = [rank for rank in ranks if not has_ended(rank)]
    for rank in left_over:
        os.kill(rank, signal.SIGKILL)
    assert not left_over


LAUNCH = "-m", "harness.training.launch", "2", f"{STAGES[3]}/train.py", "--model", "nano"


@pytest.mark.parametrize("n_times", [1, 2])
def test_after_ctrl_c_a_run_saves_and_says_where_in_a_line_and_a_second_one_ends_it(n_times, tmp_path):
    """Press Ctrl-C once or twice. After two, the run may have saved or not. torchrun must print no traceback."""
    process = start(*LAUNCH, "--steps", "100000", "--checkpoint", tmp_path / "run", preexec_fn=hears_ctrl_c)
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None
    for _ in range(n_times):
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr) == (130, "")
    if n_times == 1:
        (path,) = (tmp_path / "run").glob("step-????????")
        number = int(path.name.removeprefix("step-"))
        last_line = stdout.splitlines()[-1]
        assert last_line == f"stopped by SIGINT after step {number}, saved in {path}: the same command goes on"


def test_sigterm_that_comes_together_with_ctrl_c_ends_a_rank_without_a_traceback():
    """Unblock both signals at once: Python calls the handler of Ctrl-C, which takes away the handler of SIGTERM."""
    code = ("import os, signal; from harness.ranks.meeting import connect;"
            "from harness.training.train import StopSignal; connect(); StopSignal(30);"
            "both = {signal.SIGINT, signal.SIGTERM}; signal.pthread_sigmask(signal.SIG_BLOCK, both);"
            "[os.kill(os.getpid(), number) for number in both]; signal.pthread_sigmask(signal.SIG_UNBLOCK, both)")
    process = start("-c", code, preexec_fn=hears_ctrl_c)
    _, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr) == (-signal.SIGTERM, "")


def test_a_mistake_that_ranks_find_is_the_only_line():
    """Name a file that doesn't exist. The launcher must leave torchrun's report out."""
    process = start(*LAUNCH, "--data", "/nowhere")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 2 and len(stderr.splitlines()) == 1
    assert stderr.startswith("train.py: error: [Errno 2] No such file or directory: '/nowhere'")
