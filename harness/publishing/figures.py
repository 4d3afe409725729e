"""Makes all figures of results/ anew, of one commit, on one machine, and the pages that show them.

    python -m harness.publishing.figures        # or: make figures

Each step writes its json when it ends. A step whose json is of this commit already is left out, so what was interrupted
goes on where it stopped. Two hosts need root and iproute2. Keep the machine quiet: most steps measure time.
"""

import shlex
import subprocess
import sys
from typing import NamedTuple

from harness.publishing import results
from harness.ranks import command_line

TWO_HOSTS = "-m harness.measuring.two_hosts --rounds 2 --steps 2"
CURVE = "600mbit", "2.5gbit"  # links that only the curve has; those of the tables have steps of their own


class Step(NamedTuple):
    """A program to run, which writes `file`. `rates`: its links; the file may have those of other steps, too."""
    name: str
    minutes: float  # on two cores
    file: str
    command: str
    rates: tuple = (None,)  # None: nothing is sent over a link

    def is_done(self, head):
        """Return whether the file holds this step's figures, of commit `head`."""
        try:
            parts = results.provenance(results.load(self.file))
        except SystemExit:  # of `load`: there is no file, or one of other fields
            return False
        commits = {(rate, made.commit) for rate, made in parts if rate in self.rates}
        return commits == {(rate, head) for rate in self.rates}


STEPS = [
    Step("bench", 5, "bench.json", "bench.py"),
    Step("bench, 16 bits", 1, "bench_bfloat16.json", "bench.py --dtype bfloat16 --rounds 2"),
    Step("two hosts, 300 Mbit/s: bucket sizes, all rows, accumulation", 20, "network.json",
         f"{TWO_HOSTS} --rate 300mbit --sweep --accumulation", ("300mbit",)),
    Step("two hosts, 1 Gbit/s: bucket sizes, all rows", 8, "network.json",
         f"{TWO_HOSTS} --rate 1gbit --sweep", ("1gbit",)),
    Step("two hosts, the curve's other rates", 6, "network.json", f"{TWO_HOSTS} --curve {','.join(CURVE)}", CURVE),
    Step("variants on two hosts", 5, "network_variants.json",
         f"{TWO_HOSTS} --rate 300mbit --rows variants", ("300mbit",)),
    *(Step(f"muon on two hosts, {rate}", 2, "network_muon.json", f"{TWO_HOSTS} --rate {rate} --rows muon", (rate,))
      for rate in ("300mbit", "1gbit")),
    Step("hybrid on two hosts, 2 x 2 ranks", 2, "network_hybrid.json",
         f"{TWO_HOSTS} --rate 300mbit --ranks-per-host 2 --rows 'stage 4 overlap,hybrid'", ("300mbit",)),
    Step("losses, the same bits", 6, "losses.json", "-m harness.measuring.losses"),
    Step("faults", 15, "faults.json", "-m pytest -q -p tests.harness.faults -m faults"),
    Step("plan of 7b, and its check", 1, "plan.json", "-m harness.planning.plan --check"),
    Step("plan of 70b", 1, "plan_70b.json", "-m harness.planning.plan --model 70b --tensor-parallel 8"),
]
REPORT = ["-m harness.publishing.pages", "-m show --pages", "-m variants --page"]


def run(command):
    """Run a program of ours, and end with its exit code if that isn't 0."""
    exit_code = subprocess.run([sys.executable, *command], cwd=results.ROOT).returncode
    if exit_code:
        sys.exit(exit_code)


def main():
    parser = command_line.Parser("figures", __doc__)
    parser.parse_args()
    head = results.commit()
    if head.endswith("+"):
        parser.error("the code differs from its last commit, which figures have to name: commit first")
    due = [step for step in STEPS if not step.is_done(head)]
    for step in STEPS:
        status = f"{step.minutes:g} min" if step in due else "there"
        print(f"{status:>8}  {step.name} -> {step.file}")
    print(f"commit {head}: about {sum(step.minutes for step in due):g} minutes", flush=True)
    for step in due:
        path = results.ROOT / "results" / step.file
        if not any(other.is_done(head) for other in STEPS if other.file == step.file):
            path.unlink(missing_ok=True)  # or it would keep links that are not measured any more
        print(f"\n--- {step.name}", flush=True)
        run([*shlex.split(step.command), "--faults-json" if step.file == "faults.json" else "--json", str(path)])
        if path.exists():  # as `load` reads it: a float that was saved as 1 becomes 1.0
            path.write_text(results.to_json(results.load(step.file)), encoding="utf-8")
    for command in REPORT:
        run(shlex.split(command))


if __name__ == "__main__":
    main()
