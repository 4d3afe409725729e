"""The commands of a page, run in a small mode, and what they print."""

import re
import shlex
import subprocess
import sys

from harness.report.command_checks import split_command
from harness.report.project_files import is_placeholder

LIMIT_S = 300  # of one command

NANO = "--model nano --sequence-length 32"
SMALL = {  # what makes a program quick: appended, and the last of two equal options counts
    "bench": f"{NANO} --quick --json /dev/null",  # results/ stays whole, for `make report`
    "timeline": NANO,
    "train": f"{NANO} --batch-size 2 --steps 2",
    "test": "--collect-only --quiet",
    "show": "",
    "plan": "--layers 1 --width 1024 --sequence-length 32 --world 8",
    "report": "",
    "diff": "",
    "help": "",
}


def quick(text):
    """A command -> the words of one that does the same in seconds; None where none does."""
    program, *rest = split_command(text)
    if any(is_placeholder(word.partition("=")[2] or word) for word in rest) or "--gpu" in text or "--nnodes" in text:
        return None
    if program == "make":
        target = next((word for word in rest if re.fullmatch(r"[a-z-]+", word)), "help")
        given = "".join(word.removeprefix("ARGS=") for word in rest if word.startswith("ARGS="))
        kept = [word for word in rest if not word.startswith(("ARGS=", "PYTHON="))]
        arguments = [f"ARGS={given} {SMALL[target]}".strip()] if target in SMALL else []
        return ["make", *kept, f"PYTHON={sys.executable}", *arguments] if target in SMALL else None
    if rest[:2] == ["-m", "torch.distributed.run"]:
        program, rest = "torchrun", rest[2:]
    if program == "torchrun" and any(word.endswith(("/train.py", "/train_ddp.py")) for word in rest):
        return [sys.executable, "-m", "torch.distributed.run", *rest, *SMALL["train"].split()]
    module = rest[1] if rest[:1] == ["-m"] else rest[0] if rest else ""
    name = module.removesuffix(".py").split(".")[-1]
    if program.endswith(("python", "python3")) and module.startswith(("bench", "harness.", "stage")) and name in SMALL:
        return [sys.executable, *rest, *SMALL[name].split()]
    return None


def run(command, root):
    """Runs a Command in its quick form, in `root` -> what is wrong, or "". None: it has no quick form."""
    words_of_it = quick(command.text)
    if words_of_it is None:
        return None
    try:
        done = subprocess.run(words_of_it, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=LIMIT_S, encoding="utf-8", errors="replace")
    except subprocess.TimeoutExpired:
        return f"{shlex.join(words_of_it)} took more than {LIMIT_S} seconds"
    if done.returncode:
        return f"{shlex.join(words_of_it)} ended with {done.returncode}:\n{done.stdout[-2000:]}"
    missing = not_printed(command.shown, done.stdout)
    return f"it doesn't print {missing!r}" if missing else ""


def not_printed(shown, printed):
    """The first line of `shown` that `printed` lacks, in this order and figures aside; or None. … is anything."""
    lines = iter([_without_figures(line) for line in printed.splitlines()])
    for line in shown:
        parts = [re.escape(part) for part in re.split(r" *(?:…|\.\.\.) *", _without_figures(line))]
        if any(parts) and not any(re.fullmatch(".*".join(parts), one) for one in lines):
            return line
    return None


def _without_figures(line):
    return " ".join(re.sub(r"\d[\d.,]*", "#", line).split())
