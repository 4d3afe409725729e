"""The commands of a page, read: targets, variables, options, modules."""

import importlib.util
import itertools
import re
import shlex
import subprocess

from harness.report.markdown import PROGRAMS
from harness.report.page_checks import is_there
from harness.report.project_files import is_placeholder

TORCHRUN = {"--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port",
            "--max-restarts", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id"}
PYTEST = {"--numprocesses", "--collect-only", "--maxfail", "--durations"}


def commands_exist(page, project):
    for command in page.commands():
        for text in _mistakes(command.text, page, project):
            yield command.line, f"{command.text}: {text}"


def split_command(text):
    """A command -> its words, without variables before it, `sudo`, and the brackets of what may be left out."""
    found = shlex.split(text.replace("[", " ").replace("]", " "), comments=True)
    return list(itertools.dropwhile(lambda word: word == "sudo" or re.match(r"[A-Z_]+=", word), found))


def _mistakes(text, page, project):
    try:
        program, *rest = split_command(text) or [""]
    except ValueError as error:
        return [f"no shell reads that: {error}"]
    if program == "make":
        return _make_mistakes(rest, project)
    if program == "torchrun" or rest[:2] == ["-m", "torch.distributed.run"]:
        return _script_mistakes(rest, project)
    if program.endswith(("python", "python3")):
        return _python_mistakes(rest, project)
    if program == "cp":
        sources = [word for word in rest[:-1] if not word.startswith("-") and not is_placeholder(word)]
        return [f"there is no {word}" for word in sources if not project.has(word, ".")]
    return [] if program in PROGRAMS else [f"the check of pages doesn't know {program!r}: see report/markdown.py"]


def _make_mistakes(rest, project):
    found, arguments = [], []
    for word in rest:
        variable = re.match(r"([A-Z_]+)=(.*)", word, re.DOTALL)
        if variable:
            if variable[1] not in project.variables:
                found.append(f"the Makefile has no variable {variable[1]}")
            if variable[1] == "ARGS":
                found += _option_mistakes(shlex.split(variable[2]), project)
            if not is_placeholder(variable[2].replace("my_package", "")) and variable[1] not in ("ARGS", "PYTHON"):
                arguments.append(f"{variable[1]}={variable[2].replace('my_package', 'stage4_overlap')}")
        elif not word.startswith("-"):
            arguments.append(word)
            if word not in project.targets:
                found.append(f"the Makefile has no target {word}")
    if not found:
        run = subprocess.run(["make", "-n", *arguments, "PYTHON=true"], cwd=project.root, capture_output=True,
                             text=True)
        if run.returncode:
            found.append(run.stderr.strip().splitlines()[-1])
    return found


def _option_mistakes(rest, project):
    """Of what is given to a program: options that none has, and -k of pytest where no test is called so."""
    found = []
    for i, word in enumerate(rest):
        name = word.split("=")[0]
        if name.startswith("--") and name not in project.options | TORCHRUN | PYTEST:
            found.append(f"no program has the option {name}")
        if word == "-k":
            wanted = set(re.findall(r"\w+", " ".join(rest[i + 1 : i + 2]))) - {"and", "or", "not"}
            known = [*project.tests, *(folder for folder in project.folders)]
            found += [f"no test is called {name}" for name in wanted if not any(name in one for one in known)]
    return found


def _script_mistakes(rest, project):
    scripts = [word for word in rest if word.endswith(".py")]
    found = [f"there is no {name}" for name in scripts if not is_placeholder(name) and not project.has(name, ".")]
    if not scripts and "-m" in rest:
        found += _module_mistakes(rest[rest.index("-m") + 1 :], project)
    return found + _option_mistakes(rest, project) * (not any(is_placeholder(name) for name in scripts))


def _python_mistakes(rest, project):
    if rest[:1] == ["-m"]:
        return _module_mistakes(rest[1:], project)
    return _script_mistakes(rest, project) if rest and rest[0].endswith(".py") else []


def _module_mistakes(rest, project):
    if not rest or not is_there(rest[0], "", project):
        return [f"there is no module {' '.join(rest[:1])}"]
    top = rest[0].split(".")[0]
    if top not in project.folders:
        try:
            is_found = importlib.util.find_spec(rest[0]) is not None
        except ModuleNotFoundError:
            is_found = False
        return [] if is_found else [f"there is no module {rest[0]}"]
    return _option_mistakes(rest[1:], project)
