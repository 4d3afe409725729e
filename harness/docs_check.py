"""Do the pages still say what is there? Every *.md of the project: links, names, commands, and how long the page is."""

import argparse
import ast
import fnmatch
import functools
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

from harness import command_line
from harness import processes as signals
from harness.tables import words

# -------------------------------------------------------------------------------------------------------- project_files
# What the project has: files that git doesn't ignore, pages, targets, options, tests.


ROOT = Path(__file__).resolve().parents[1]


def pages(root=ROOT):
    """Every *.md that git doesn't ignore -> list of Pages."""
    return [Page(root / name, root) for name in sorted(contents(root)[0]) if name.endswith(".md")]


def contents(root):
    """-> (files, folders), paths from `root` on with / between the parts; without what is_ignored."""
    files, folders, patterns = set(), set(), ignored_patterns(root)
    for folder, inner, names in os.walk(root):
        here = Path(folder).relative_to(root)
        inner[:] = [name for name in inner if not is_ignored(here / name, patterns)]  # os.walk goes into no others
        folders.update((here / name).as_posix() for name in inner)
        files.update((here / name).as_posix() for name in names if not is_ignored(here / name, patterns))
    return files, folders


def ignored_patterns(root):
    ignore = root / ".gitignore"
    return [line.rstrip("/") for line in ignore.read_text(encoding="utf-8").split()] if ignore.exists() else []


def is_ignored(path, patterns):
    """`path`: from the root on. Whether git takes it out of the project, or a name that begins with a dot."""
    return any(part.startswith(".") and part != ".." for part in path.parts) or any(
        fnmatch.fnmatch(name, pattern) for pattern in patterns for name in (*path.parts, path.as_posix()))


class Project:
    """What pages may name.

    Attributes:
        files, folders: see `contents`.
        tests: names of test functions and of files of tests.
        options: --name, of every program and of conftest.py.
        targets, variables: of the Makefile.
        of_readers: files that a page has its reader save: named in the first line of a sample, or in "save … as".
    """

    def __init__(self, root, every):
        self.root = root
        self.of_readers = {name for page in every for name in (
            *re.findall(r"^```python\n# (\w+\.py)$", page.text, re.MULTILINE),
            *re.findall(r"\b[Ss]ave [^.`]+ as `(\w+\.py)`", page.text))}
        self.files, self.folders = contents(root)
        self.ignored = ignored_patterns(root)
        sources = {name: (root / name).read_text(encoding="utf-8") for name in self.files if name.endswith(".py")}
        tests = [name for name in sources if name.startswith("tests/")]
        self.tests = {Path(name).stem for name in tests} | {
            test for name in tests for test in re.findall(r"def (test_\w+)", sources[name])}
        self.options = {option for source in sources.values() for option in re.findall(r"[\"'](--[\w-]+)[\"']", source)}
        self.sources = "\n".join(source for name, source in sources.items() if not name.startswith("tests/"))
        makefile = root / "Makefile"
        text = makefile.read_text(encoding="utf-8") if makefile.exists() else ""
        self.targets = set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))
        self.variables = set(re.findall(r"^(?:export )?([A-Z_]+) *\?=", text, re.MULTILINE)) | set(
            re.findall(r"\$\(([A-Z_]+)\)", text))

    def has(self, name, beside):
        """Whether a file or folder is called `name`, from the root on or from the folder `beside` on, or ends so."""
        name = name.rstrip("/")
        known = self.files | self.folders | self.of_readers
        return (name in known or os.path.normpath(os.path.join(beside, name)).replace(os.sep, "/") in known
                or any(one.endswith(f"/{name}") for one in known) or is_ignored(Path(name), self.ignored))


def is_placeholder(text):
    return "…" in text or "..." in text or "my_" in text or re.search(r"\b[A-Z]{2,}\b", text) is not None


# ------------------------------------------------------------------------------------------------------------- markdown
# A page of markdown, cut up: blocks, prose, spans of code, links, commands.


class Block(NamedTuple):
    """Of a page: code in a fence, or indented by 4. `line`: where it begins; `language`: as the fence says, or ""."""
    line: int
    language: str
    lines: list


class Command(NamedTuple):
    """A line that a reader types. `shown`: what the page says that it prints; [] if it doesn't."""
    line: int
    text: str
    shown: list


class Page:
    """A markdown file, cut up.

    Attributes:
        path, name: the file; as it is called from the project's root.
        blocks: list of Block.
        prose: the text without blocks; as many lines as the file has.
    """

    def __init__(self, path, root):
        self.path, self.root, self.name = path, root, path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.blocks, prose, block, fence, is_after_blank = [], [], None, None, True
        for number, line in enumerate(self.text.splitlines(), start=1):
            mark = re.match(r" {0,3}(`{3,}|~{3,}) *(\w*)", line)
            if fence:
                if mark and mark[1].startswith(fence) and not mark[2]:
                    fence = block = None
                else:
                    block.lines.append(line)
            elif mark:
                fence, block = mark[1], Block(number + 1, mark[2], [])
                self.blocks.append(block)
            elif line.startswith("    ") and (is_after_blank or block):
                if block is None:
                    block = Block(number, "", [])
                    self.blocks.append(block)
                block.lines.append(line[4:])
            elif block and not line.strip():
                block.lines.append("")
            else:
                block = None
                prose.extend([""] * (number - 1 - len(prose)) + [line])
            is_after_blank = not line.strip()
        self.prose = "\n".join(prose)

    def line_at(self, offset):
        return self.prose.count("\n", 0, offset) + 1

    def spans(self):
        """-> (line, text) of each `code` in the prose; one that is broken over two lines is one."""
        for match in re.finditer(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", self.prose, re.DOTALL):
            if "\n\n" not in match[2]:
                yield self.line_at(match.start()), " ".join(match[2].split())

    def links(self):
        """-> (line, target) of links, pictures, and HTML's src and href."""
        without_code = re.sub(r"`[^`\n]*`", lambda span: "`" + "." * (len(span[0]) - 2) + "`", self.prose)
        for pattern in (r"\]\(<?([^)\s>]+)>?(?: [^)]*)?\)", r"^ {0,3}\[[^\]]+\]: *(\S+)",
                        r"(?:src|href|srcset)=\"([^\"]+)\""):
            for match in re.finditer(pattern, without_code, re.MULTILINE):
                yield self.line_at(match.start()), match[1]

    def anchors(self):
        """What #… may name: headings, as GitHub writes them, and HTML's ids."""
        found = set(re.findall(r"(?:id|name)=\"([^\"]+)\"", self.prose))
        for heading in re.findall(r"^#{1,6} +(.+?) *#*$", self.prose, re.MULTILINE):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(next(name for name in (slug, *(f"{slug}-{i}" for i in range(1, 100))) if name not in found))
        return found

    def commands(self):
        """-> Commands, of blocks and of spans."""
        for block in self.blocks:
            if block.language in ("", "text", *SHELLS):
                yield from commands_of(block)
        for line, span in self.spans():
            if len(span.split()) > 1 and program_of(span) in PROGRAMS:
                yield Command(line, span, [])


SHELLS = ("sh", "bash", "shell", "console")
PROGRAMS = ("make", "torchrun", "python", "python3", ".venv/bin/python", "pip", "cp", "cd", "git", ".", "source",
            "export")


def program_of(text):
    """The first word of a command, behind variables that are set for it."""
    return next((word for word in text.split() if word != "sudo" and not re.match(r"[A-Z_]+=", word)), "")


def commands_of(block):
    lines = [(block.line + i, line) for i, line in enumerate(block.lines)]
    shows_output = any(line.startswith("$ ") for _, line in lines)
    number, text, shown = None, "", []
    for at, line in lines:
        if text.endswith("\\"):
            text = f"{text[:-1].rstrip()} {line.strip()}"
        elif line.startswith("$ ") if shows_output else _is_command(line, block.language):
            if number:
                yield Command(number, text, shown)
            number, text, shown = at, re.sub(r"\s+#\s.*", "", line.removeprefix("$ ").strip()), []
        elif shows_output and number:
            shown.append(line)
    if number:
        yield Command(number, text, shown)


def _is_command(line, language):
    if language in SHELLS:
        return bool(line.strip()) and not line.lstrip().startswith("#")
    return not line.startswith(" ") and program_of(line) in PROGRAMS and len(line.split()) > 1


# ------------------------------------------------------------------------------------------------------- command_checks
# The commands of a page, read: targets, variables, options, modules.


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


# ---------------------------------------------------------------------------------------------------------- page_checks
# What can be read off a page and the files: links, names, samples, quotations, rows that stand twice.


# Outside of code and tables. A page that teaches is short; what is looked things up in has no bound but patience.
MOST_WORDS = {
    "README.md": 750,
    "stage1_naive_broadcast/README.md": 600,
    "stage2_allgather/README.md": 520,
    "stage3_gradbuffer/README.md": 950,
    "stage4_overlap/README.md": 1300,
    "docs/plan.md": 700,
    "variants/README.md": 700,
}
MOST_WORDS_ELSEWHERE = 9000
SENTENCES = ("planned", "checked")  # blocks of `make report` that are no tables


def long_pages(page, project):
    most = MOST_WORDS.get(page.name, MOST_WORDS_ELSEWHERE)
    found = words("\n".join(line for line in page.prose.splitlines() if " | " not in line))
    if found > most:
        yield 1, f"{found} words: it may have {most}"
    generated = set(re.findall(r"<!-- report: (\w+)", page.text)).difference(SENTENCES)
    if page.name.split("/")[0] not in ("README.md", "results") and generated:
        yield 1, "a generated table: tables stand in results/"


def broken_links(page, project):
    for line, target in page.links():
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # not of this project
        name, _, anchor = target.partition("#")
        path = page.path.parent / name if name else page.path
        if not path.exists():
            yield line, f"a link to {target}: there is no {name}"
        elif anchor and path.suffix == ".md" and anchor not in Page(path.resolve(), page.root.resolve()).anchors():
            yield line, f"a link to {target}: there is no such heading"
        elif re.fullmatch(r"L\d+", anchor) and int(anchor[1:]) > len(path.read_text(encoding="utf-8").splitlines()):
            yield line, f"a link to {target}: the file has fewer lines"


def unknown_names(page, project):
    """Files, folders and tests that are called by their names."""
    foreign = set(re.findall(r"\[`([^`]+)`\]\(https?:", page.text))
    for line, span in page.spans():
        if span in foreign or is_placeholder(span):
            continue
        if re.fullmatch(r"[\w./-]+(\.(py|md|svg|json|toml)|/)", span) and not span.startswith(("/", "~")):
            if not project.has(span, page.path.parent.relative_to(page.root).as_posix()):
                yield line, f"`{span}`: there is no such file or folder"
        elif re.fullmatch(r"test_\w+", span) and span not in project.tests:
            yield line, f"`{span}`: there is no such test"


def wrong_samples(page, project):
    """Blocks of Python: whether they are Python, and what they import of the project, and call of its optimizers."""
    for block in page.blocks:
        if block.language != "python":
            continue
        code = "\n".join(block.lines).replace("…", "...")
        try:
            tree = ast.parse(textwrap.dedent(code))
        except SyntaxError as error:
            yield block.line + (error.lineno or 1) - 1, f"this sample is no Python: {error.msg}"
            continue
        for node in ast.walk(tree):
            at = block.line + getattr(node, "lineno", 1) - 1
            for module, name in _imports(node):
                if not is_there(module, name, project):
                    yield at, f"import of {f'{name} from ' * bool(name)}{module}: there is no such thing"
            if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "optimizer"
                    and not re.search(rf"\b{node.attr}\b", project.sources)):
                yield at, f"optimizer.{node.attr}: no stage has that"


def _imports(node):
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from ((node.module, alias.name) for alias in node.names)


def is_there(module, name, project):
    """Whether a module of the project exists, and has that name. Those of others are torch's or the reader's."""
    path = module.replace(".", "/")
    if f"{path}.py" in project.of_readers:
        return True
    if path.split("/")[0] not in project.folders | {file.removesuffix(".py") for file in project.files}:
        top = module.split(".")[0]
        return importlib.util.find_spec(top) is not None or is_placeholder(module) or top in libraries(project)
    file = next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in project.files), None)
    if file is None:
        return path in project.folders and not name
    source = (project.root / file).read_text(encoding="utf-8")
    return not name or re.search(rf"\b{name}\b", source) is not None or f"{path}/{name}.py" in project.files


def libraries(project):
    """What the extra `frameworks` installs: docs/frameworks.md is about these, and a machine may lack them."""
    has = "pyproject.toml" in project.files
    settings = (project.root / "pyproject.toml").read_text(encoding="utf-8") if has else ""
    extra = re.search(r"^frameworks = \[(.*?)\]", settings, re.MULTILINE | re.DOTALL)
    return re.findall(r'"(\w+)', extra[1]) if extra else []


def gone_names(page, project):
    """In docs/names.md the first column is ours: each name in it must stand in the code."""
    if page.name != "docs/names.md":
        return
    folders = ("stage", "guard/", "checkpoint/", "variants/")
    code = "\n".join((project.root / file).read_text(encoding="utf-8") for file in sorted(project.files)
                     if file.startswith(folders) and file.endswith(".py"))
    there = set(re.findall(r"\w+", code)) | {file.rsplit("/", 1)[-1].removesuffix(".py") for file in project.files}
    for line, text in enumerate(page.text.splitlines(), 1):
        if text.startswith("| "):
            for name in re.findall(r"`([^`]+)`", text.split("|")[1]):
                unknown = [word for word in re.findall(r"[A-Za-z_]\w*", name) if word not in there]
                if unknown:
                    yield line, f"`{name}`: there is no {unknown[0]} in the code"


def wrong_quotes(page, project):
    """In a chapter a sample of which more than half stands in the stage's files is a quotation: then all of it does."""
    folder = page.path.parent
    if not folder.name.startswith("stage"):
        return
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    there = {_bare(line) for source in sources for line in source.splitlines()}
    for block in page.blocks:
        lines = [(block.line + i, _bare(line)) for i, line in enumerate(block.lines)]
        lines = [(at, line) for at, line in lines if line and "…" not in line]
        missing = [(at, line) for at, line in lines if line not in there]
        if block.language == "python" and len(missing) < len(lines) / 2:
            yield from ((at, f"`{line}` is not in {folder.name}/, where the rest of this sample is from")
                        for at, line in missing)


def _bare(line):
    """Without blanks at both ends, and without a comment."""
    return re.sub(r"(^|  )#.*", "", line).strip()


def rows_twice(every):
    """Rows of tables, and generated tables, that stand in more than one place."""
    seen = {}
    for page in every:
        blocks = re.finditer(r"<!-- report: (\w+) -->", page.text)
        rows = [(page.text.count("\n", 0, match.start()) + 1, match[0]) for match in blocks]
        rows += [(page.line_at(match.start()), " | ".join(filter(None, map(str.strip, match[0].split("|")))))
                 for match in re.finditer(r"^.*\|.*\|.*$", page.prose, re.MULTILINE) if re.search(r"\w", match[0])]
        for line, row in rows:
            first, at = seen.setdefault(row, (page, line))
            if first is not page or row.startswith("<!--") and at != line:
                yield page, line, f"{row!r} stands in {first.name}:{at} already"


# --------------------------------------------------------------------------------------------------------- command_runs
# The commands of a page, run in a small mode, and what they print.


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


# ----------------------------------------------------------------------------------------------------------- docs_check
# Do the pages still say what is there? Every *.md of the project: links, names, commands, and how long the page is.


def problems(root=ROOT, of=None):
    """-> lines "PAGE:LINE: what is wrong"; of all pages, or of those whose names are in `of`."""
    every = pages(root)
    project = Project(root, every)
    found = []
    for page in every:
        if of is None or page.name in of:
            checks = (long_pages, broken_links, unknown_names, wrong_samples, wrong_quotes, gone_names, commands_exist)
            found += [f"{page.name}:{line}: {text}" for check in checks for line, text in check(page, project)]
    twice = [(page, *rest) for page, *rest in rows_twice(every)]
    return found + [f"{page.name}:{line}: {text}" for page, line, text in twice if of is None or page.name in of]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = functools.partial(command_line.fail, "docs")
    parser.add_argument("--pages", default="", metavar="TEXT", help="only pages whose name holds TEXT")
    args = parser.parse_args()
    chosen = [page for page in pages() if args.pages in page.name]
    if not chosen:
        parser.error(f"--pages {args.pages!r}: no page has that in its name")
    found = problems(of=[page.name for page in chosen])
    print(*found, sep="\n", end="\n" * bool(found))
    signals.exit_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        left_out = shutil.ignore_patterns(".venv", ".git", "__pycache__", "runs", "measured")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
        done = set()  # of two commands that are the same in small one is run
        for page in chosen:
            for command in page.commands():
                small = " ".join(quick(command.text) or [command.text])
                if small in done and not command.shown:
                    continue
                done.add(small)
                wrong = run(command, copy)
                outcome = {None: "read only", "": "as shown" if command.shown else "runs"}.get(wrong, wrong)
                print(f"{page.name}:{command.line}: {command.text}: {outcome}", flush=True)
                found += [wrong] * bool(wrong)
    for page in chosen:
        print(f"{page.name}: {words(page.text)} words")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
