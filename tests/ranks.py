"""Scripts run as ranks, in processes forked from one that has imported torch: a rank then starts in half a second.

And so do the `Workers` that such a script starts: it finds that process running, with the environment of the tests.
torchrun itself, and Python's own start and end, are left to the tests that start real processes.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from harness.ranks.workers import start_forkserver

# torchrun's own entry would not do: it starts a Python for each rank, which imports torch for seconds, and where one
# rank fails it ends the others, while many tests are about what those notice. Hence what torchrun's environment and a
# new Python would be is made in the fork: by private names of forkserver, and by leaving out what it has imported.
ROOT = Path(__file__).resolve().parents[1]
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
               "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
LIMIT_S = 600  # a rank that hangs in a collective takes 120


class Ended(NamedTuple):
    """A rank that has ended. `code`: its exit code, or minus the signal that killed it."""
    code: int
    stdout: str
    stderr: str


def hears_ctrl_c():
    """In the child: a shell that runs the tests in the background has them, and all that they start, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_ranks(n_ranks, script, *args, cwd=ROOT):
    """Runs a script as `n_ranks` ranks, with torchrun's environment -> an Ended for each. None is left behind.

    Nobody ends the others when a rank fails: they have to notice. Raises TimeoutError after LIMIT_S seconds.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's: it has its port already
    shared = {"WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
              "TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1}
    return _run([{"RANK": rank, "LOCAL_RANK": rank, **shared} for rank in range(n_ranks)], script, args, cwd)


def run_alone(script, *args, cwd=ROOT, limit_s=LIMIT_S, **environment):
    """Runs a script as `python script.py` does, without torchrun's environment, but with this one -> Ended."""
    (ended,) = _run([environment], script, args, cwd, limit_s)
    return ended


def run_module(module, *args, **kwargs):
    """The same of `python -m module`."""
    return run_alone(f"-m {module}", *args, **kwargs)


def _the_server():
    """-> how the process that forks is reached, as attributes of a ForkServer: private ones, the same since 3.10."""
    server = forkserver.connect_to_new_process.__self__
    server.ensure_running()
    names = "_forkserver_address", "_forkserver_authkey"  # the latter since 3.14
    return {name: value for name, value in vars(server).items() if name in names}


def _find_server(server):
    """In the new process: it starts Workers from that process too, and not one of its own, which imports torch anew."""
    vars(forkserver._forkserver).update(server)
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None


def _run(environments, script, args, cwd, limit_s=LIMIT_S):
    start_forkserver()
    context, command = multiprocessing.get_context("forkserver"), [str(script), *map(str, args)]
    kept = {name: value for name, value in os.environ.items()
            if name not in OF_TORCHRUN and not name.startswith("PYTEST_")}
    with tempfile.TemporaryDirectory() as folder:
        files = [[Path(folder, f"{rank}.{name}") for name in ("out", "err")] for rank in range(len(environments))]
        for file in sum(files, []):
            file.touch()
        processes = [context.Process(target=_be_a_rank, args=(
            command, {**kept, **{name: str(value) for name, value in environment.items()}}, str(cwd), outputs,
            _the_server())) for environment, outputs in zip(environments, files)]
        deadline = time.monotonic() + limit_s
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0, deadline - time.monotonic()))
            if running := [rank for rank, process in enumerate(processes) if process.is_alive()]:
                said = "".join(errors.read_text() for _, errors in files)
                raise TimeoutError(f"ranks {running} still run after {limit_s} seconds; the ranks have said:\n{said}")
        finally:
            for process in processes:
                if process.pid:
                    process.kill()
                    process.join()
        return [Ended(process.exitcode, *(file.read_text() for file in outputs))
                for process, outputs in zip(processes, files)]


def git(folder, *command):
    """-> what it prints, in a repository of its own: not in that of a hook which runs these tests."""
    settings = "user.name=a", "user.email=a@b.example", "commit.gpgsign=false"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    run = subprocess.run(["git", *(word for one in settings for word in ("-c", one)), *command], cwd=folder,
                         env=environment, capture_output=True, text=True, check=True, timeout=300)
    return run.stdout.strip()


def _be_a_rank(command, environment, cwd, outputs, server):
    """In the new process: becomes what `python script.py` would be, as far as the script can see; and ends like it."""
    gc.freeze()  # as in harness.ranks.workers
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests have it ignored
    _find_server(server)
    for number, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # What the script imports of this repository it must find by itself, and new, not as the tests have left it.
    module = command[0].removeprefix("-m ") if command[0].startswith("-m ") else None
    found_in = cwd if module else Path(command[0]).resolve().parent
    found_first = [str(found_in), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*found_first, *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if (ROOT / name.split(".")[0]).is_dir()]:
        del sys.modules[name]
    sys.argv[:] = ["-m", *command[1:]] if module else command
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = command[0]
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), vars(main))
    except SystemExit:
        raise  # multiprocessing ends a process as Python does, but for exceptions it has a way of its own
    except BaseException:
        sys.excepthook(*sys.exc_info())  # which train.py replaces
        sys.exit(1)
