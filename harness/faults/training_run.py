"""torchrun with a train.py, watched, and its ranks reached."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness.run import signals

ROOT = Path(__file__).resolve().parents[2]
SAVE_EVERY = 20
START_LIMIT_S = 120  # an attempt that says nothing for so long hangs


class Run:
    """torchrun with a train.py; it ends with the `with` that it stands in. `lines`: what it has printed so far."""

    def __init__(self, script, ranks, steps, folder, *more, seed=0, batch_size=4, save_every=SAVE_EVERY,
                 max_restarts=0):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   f"--max-restarts={max_restarts}", script, "--model=nano", "--sequence-length=32",
                   f"--batch-size={batch_size}", f"--steps={steps}", f"--seed={seed}", f"--checkpoint={folder}",
                   f"--save-every={save_every}", *more]
        self.command = " ".join(["torchrun", *command[3:]])
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        preexec_fn=signals.end_with_parent)
        self.lines, self.unread = [], queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.terminate()
        self.process.wait(60)  # torchrun gives its ranks 30

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self.unread.put(line.rstrip())
        self.unread.put(None)

    def starts(self):
        """Yield, for each attempt to train, the name of the checkpoint it goes on from; "" for none."""
        resumed = ""
        while (line := self.unread.get(timeout=START_LIMIT_S)) is not None:
            if match := re.match(r"resumed from ([^,]+)", line):
                resumed = Path(match[1]).name
            elif line.startswith("validation loss before"):
                yield resumed
                resumed = ""

    def rank_processes(self):
        """-> the ids of torchrun's children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    def kill_a_rank(self, chance):
        """SIGKILL for one of torchrun's children -> whether there was one."""
        children = self.rank_processes()
        if children:
            os.kill(chance.choice(children), signal.SIGKILL)
        return bool(children)

    def said(self, pattern):
        """Waits until a line matches -> the match."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            threading.Event().wait(0.05)
        raise AssertionError("\n".join([f"no line has {pattern!r}", *self.lines[-20:]]))

    def end(self):
        """-> the exit code, which torchrun is given a moment for."""
        return self.process.wait(30)


def train_script(stage):
    return str(next(ROOT.glob(f"stage{stage}_*")).relative_to(ROOT) / "train.py")
