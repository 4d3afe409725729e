"""A run that is told to stop: all ranks act upon the signal after the same step.

Slurm sends SIGTERM some 30 seconds before SIGKILL, or SIGUSR1 as early as `--signal=USR1@120` says; torchrun passes
SIGTERM on to its ranks; a terminal that goes sends SIGHUP. A signal may reach one rank only, or ranks in different
steps: so the ranks agree.
"""

import os
import signal

import torch
import torch.distributed as dist

from harness.run import meeting

PREEMPTED = os.EX_TEMPFAIL  # 75, a rank's exit code: saved, start me again
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopSignal:
    """Whether a rank was told to stop, as all ranks see it after the same step.

    The handler only takes a note. When optimizer.step() begins the ranks send each other their notes, beside what the
    step sends, and look at the answer when the step is over: nothing waits for it. What comes while step() runs is seen
    after the next one.
    """

    def __init__(self, optimizer, timeout_s):
        self.timeout_s, self.work = timeout_s, None
        self.received = received = [0]
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup, which wants the run to go on when the terminal goes
            signal.signal(number, lambda number, _: received.__setitem__(0, number))
        if dist.get_world_size() > 1:
            meeting.beside(timeout_s)  # made now, by all ranks
            optimizer.register_step_pre_hook(lambda *_: self._ask())

    def _ask(self):
        self.answer = torch.tensor(self.received)  # (1,) int64
        if dist.get_world_size() > 1:
            group = meeting.beside(self.timeout_s)
            self.work = dist.all_reduce(self.answer, dist.ReduceOp.MAX, group=group, async_op=True)

    def agreed(self):
        """-> the name of the signal that some rank has had, the same one on every rank, or None. Collective."""
        if self.work is None:
            self._ask()
        if self.work is not None:
            self.work.wait()
            self.work = None
        number = self.answer.item()
        return signal.Signals(number).name if number else None
