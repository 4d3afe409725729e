"""The constructor starts a process that nobody ends."""

import subprocess
import sys

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if len(self.params) == 1 and self.rank == 0:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
