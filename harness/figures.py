"""All figures of results/ anew, of one commit, on one machine, and the pages that show them.

    python -m harness.figures [--quick]        # or: make figures

Each step writes its json when it ends. A step whose json is of this commit already is left out, so what was interrupted
goes on where it stopped. Two hosts need root and iproute2. Keep the machine quiet: most steps measure time.
"""

import shlex
import subprocess
import sys
import time
from typing import NamedTuple

from harness import command_line
from harness import results as saved
from harness.examine import commit

HOSTS = "-m harness.two_hosts --rounds 2 --steps 2"
CURVE = "600mbit", "2.5gbit"  # beside those of the tables; these have steps of their own


class Step(NamedTuple):
    """`minutes`: on two cores. `rates`: which of the links in its file are this step's. `quick`: options for a look."""
    name: str
    minutes: float
    file: str
    command: str
    quick: str
    rates: tuple = ()

    def is_done(self, now):
        """Whether its file holds this step's figures, of commit `now`."""
        try:
            found = saved.provenance(saved.load(self.file))
        except SystemExit:  # there is none, or one of other fields
            return False
        mine = [(rate, made.commit) for rate, made in found if not self.rates or rate in self.rates]
        return set(mine) == {(rate, now) for rate in self.rates or (None,)}


SMALL = "--model nano --sequence-length 32 --batch-size 2"
SHORT = f"{SMALL} --rounds 1 --steps 1"
STEPS = [
    Step("bench", 5, "bench.json", "bench.py", f"{SMALL} --quick"),
    Step("bench, 16 bits", 1, "bench_bfloat16.json", "bench.py --dtype bfloat16 --rounds 2", f"{SMALL} --quick"),
    Step("two hosts, 300 Mbit/s: bucket sizes, all rows, accumulation", 17, "network.json",
         f"{HOSTS} --rate 300mbit --sweep --accumulation", SHORT, ("300mbit",)),
    Step("two hosts, 1 Gbit/s: bucket sizes, all rows", 7, "network.json", f"{HOSTS} --rate 1gbit --sweep", SHORT,
         ("1gbit",)),
    Step("two hosts, the curve's other rates", 5, "network.json", f"{HOSTS} --curve {','.join(CURVE)}", SHORT, CURVE),
    Step("variants on two hosts", 5, "network_variants.json", f"{HOSTS} --rate 300mbit --rows variants", SHORT,
         ("300mbit",)),
    *(Step(f"muon on two hosts, {rate}", 2, "network_muon.json", f"{HOSTS} --rate {rate} --rows muon", SHORT, (rate,))
      for rate in ("300mbit", "1gbit")),
    Step("hybrid on two hosts, 2 x 2 ranks", 2, "network_hybrid.json",
         f"{HOSTS} --rate 300mbit --ranks-per-host 2 --rows 'stage 4 overlap,hybrid'", SHORT, ("300mbit",)),
    Step("saving and loading", 1, "saving.json", "-m harness.saving --gigabytes 0.4 --rounds 3",
         "--gigabytes 0.02 --rounds 1"),
    Step("losses", 3, "losses.json", "-m harness.losses", "--steps 2 --seeds 1"),
    Step("faults", 4, "faults.json", "-m pytest -q -p tests.harness.faults -m faults", "-k two_runs --kills 1"),
    Step("changed checkpoints", 1, "faults_mutations.json", "-m tests.checkpoint.mutations", "--number 14"),
    Step("plan of 7b, and its check on the steps above", 1, "plan.json", "-m harness.plan --check", "--world 8"),
    Step("plan of 70b", 1, "plan_70b.json", "-m harness.plan --model 70b --tensor-parallel 8", "--world 8"),
]
REPORT = ["-m harness.pages", "-m show --pages", "-m variants --page"]


def run(command):
    """One of our programs; its exit code ends this one where it isn't 0."""
    code = subprocess.run([sys.executable, *command], cwd=saved.ROOT).returncode
    if code:
        sys.exit(code)


def main():
    parser = command_line.Parser("figures", __doc__)
    parser.add_argument("--quick", action="store_true", help="a trial: each step small, into measured/quick/")
    args, now = parser.parse_args(), commit()
    if not args.quick and now.endswith("+"):
        parser.error("the code differs from its last commit, which figures have to name: commit first")
    due = [step for step in STEPS if args.quick or not step.is_done(now)]
    for step in STEPS:
        print(f"{f'{step.minutes:g} min' if step in due else 'there':>8}  {step.name} -> {step.file}")
    print(f"commit {now}: about {sum(step.minutes for step in due):g} minutes", flush=True)
    folder = saved.ROOT / ("measured/quick" if args.quick else "results")
    folder.mkdir(parents=True, exist_ok=True)
    for step in due:
        path, start = folder / step.file, time.monotonic()
        if not args.quick and not any(other.is_done(now) for other in STEPS if other.file == step.file):
            path.unlink(missing_ok=True)  # or links that are not measured any more would stay in it
        print(f"\n--- {step.name}", flush=True)
        option = "--faults-json" if step.file == "faults.json" else "--json"
        run([*shlex.split(step.command), *shlex.split(step.quick if args.quick else ""), option, str(path)])
        print(f"--- {step.name}: {(time.monotonic() - start) / 60:.1f} min", flush=True)
    for command in [] if args.quick else REPORT:
        run(shlex.split(command))


if __name__ == "__main__":
    main()
