"""Do the pages still say what is there? Every *.md of the project: links, names, commands, and how long the page is.

    python -m harness.docs_check [--pages README]

Reads pages with markdown-it, which rich brings, and runs nothing but `make --dry-run`.
"""

import ast
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from markdown_it import MarkdownIt

from harness import command_line

ROOT = Path(__file__).resolve().parents[1]
# Words outside of code and tables, at the most. A page that teaches is short; where things are looked up is not.
MOST_WORDS = {"README.md": 750, "stage1_naive_broadcast/README.md": 600, "stage2_allgather/README.md": 520,
              "stage3_gradbuffer/README.md": 950, "stage4_overlap/README.md": 1300, "docs/plan.md": 700,
              "variants/README.md": 700}
MOST_WORDS_ELSEWHERE = 9000

SHELLS = ("sh", "bash", "shell", "console")
PROGRAMS = ("make", "torchrun", "python", "python3", ".venv/bin/python", "pip", "cp", "cd", "git", ".", "source",
            "export")
OPTIONS = {  # of torchrun and of pytest; those of our programs are read from their sources
    "--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts",
    "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--numprocesses", "--collect-only", "--maxfail", "--durations"}


def is_placeholder(text):
    return "…" in text or "..." in text or "my_" in text or re.search(r"\b[A-Z]{2,}\b", text) is not None


class Page:
    """A markdown file. `blocks`: (first line, language, lines) of code; `spans`: (line, `code`) in prose; `links`:
    (line, target); `rows`: (line, cells) of tables; `anchors`: what #… may name; `n_words`: outside of code, tables,
    and what is generated."""

    def __init__(self, path, root):
        self.path, self.root, self.name = path, root, path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.blocks, self.spans, self.links, self.rows, self.anchors, self.n_words = [], [], [], [], set(), 0
        line, inside, is_generated = 1, "", False
        for token in MarkdownIt("commonmark").enable("table").parse(self.text):
            line = token.map[0] + 1 if token.map else line
            inside = token.type if token.nesting == 1 else inside
            if token.type in ("fence", "code_block"):
                at = line + (token.type == "fence")
                self.blocks.append((at, token.info.split(" ")[0], token.content.splitlines()))
            elif token.type == "tr_open":
                self.rows.append((line, []))
            elif token.type == "html_block":
                is_generated = "<!-- report:" in token.content or is_generated and "<!-- end" not in token.content
                self._read_html(token.content, line)
            elif token.type == "inline":
                self._read_inline(token.children, line)
                if inside == "heading_open":  # its anchor as GitHub makes it
                    text = "".join(child.content for child in token.children).lower()
                    slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
                    names = (slug, *(f"{slug}-{i}" for i in range(1, 100)))
                    self.anchors.add(next(name for name in names if name not in self.anchors))
                if inside in ("th_open", "td_open"):
                    self.rows[-1][1].append(token.content)
                elif not is_generated:
                    self.n_words += len(token.content.split())

    def _read_inline(self, children, line):
        for child in children:
            if child.type == "code_inline":
                self.spans.append((line, " ".join(child.content.split())))
                line += child.content.count("\n")
            elif child.type in ("link_open", "image"):
                self.links.append((line, child.attrs.get("href", child.attrs.get("src"))))
            elif child.type == "html_inline":
                self._read_html(child.content, line)
            line += child.type in ("softbreak", "hardbreak")

    def _read_html(self, text, line):
        self.anchors |= set(re.findall(r"(?:id|name)=\"([^\"]+)\"", text))
        for number, part in enumerate(text.splitlines(), line):
            self.links += [(number, target) for target in re.findall(r"(?:src|href|srcset)=\"([^\"]+)\"", part)]

    def commands(self):
        """-> (line, what a reader types), of blocks and of spans. A line that ends in a backslash goes on in the next.
        """
        for first, language, lines in self.blocks:
            shows_output, begun = any(line.startswith("$ ") for line in lines), None
            for at, line in enumerate(lines if language in ("", "text", *SHELLS) else (), first):
                if begun:
                    at, line = begun[0], f"{begun[1]} {line.strip()}"
                elif not (line.startswith("$ ") if shows_output else is_command(line, language)):
                    continue
                found = at, line.removeprefix("$ ").removesuffix("\\").strip()
                begun = found if line.endswith("\\") else None
                if not begun:
                    yield found
        yield from ((line, span) for line, span in self.spans if is_command(span, ""))


def without_settings(words):
    """The words of a command from the program on: `sudo` and variables may stand before it."""
    return list(itertools.dropwhile(lambda word: word == "sudo" or re.match(r"[A-Z_]+=", word), words))


def is_command(line, language):
    if language in SHELLS:
        return bool(line.strip()) and not line.lstrip().startswith("#")
    words = without_settings(line.split())
    return not line.startswith(" ") and bool(words) and words[0] in PROGRAMS and len(line.split()) > 1


class Project:
    """What pages may name: files and folders that git knows or would add, tests, options, targets, variables.

    `of_readers`: files that a page has its reader save: named in the first line of a sample, or in "save … as".
    """

    def __init__(self, root=ROOT):
        self.root = root
        git = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=root,
                             capture_output=True, text=True)
        listed = git.stdout.split("\0") if git.returncode == 0 else [  # an archive of the project is no repository
            path.relative_to(root).as_posix() for path in root.rglob("[!.]*") if "/." not in path.as_posix()]
        self.files = {name for name in listed if name and (root / name).is_file()}
        self.folders = {parent.as_posix() for name in self.files for parent in Path(name).parents} - {"."}
        self.pages = [Page(root / name, root) for name in sorted(self.files) if name.endswith(".md")]
        self.of_readers = {name for page in self.pages for name in (
            *re.findall(r"^```python\n# (\w+\.py)$", page.text, re.MULTILINE),
            *re.findall(r"\b[Ss]ave [^.`]+ as `(\w+\.py)`", page.text))}
        sources = {name: (root / name).read_text(encoding="utf-8") for name in self.files if name.endswith(".py")}
        tests = {name: source for name, source in sources.items() if name.startswith("tests/")}
        self.tests = {Path(name).stem for name in tests} | set(re.findall(r"def (test_\w+)", "\n".join(tests.values())))
        self.options = OPTIONS | set(re.findall(r"[\"'](--[\w-]+)[\"']", "\n".join(sources.values())))
        self.sources = "\n".join(source for name, source in sources.items() if name not in tests)
        makefile, self.settings = ((root / name).read_text(encoding="utf-8") if name in self.files else ""
                                   for name in ("Makefile", "pyproject.toml"))
        self.variables = set(re.findall(r"\$\(([A-Z_]+)\)", makefile)) | set(
            re.findall(r"^([A-Z_]+) *\?=", makefile, re.MULTILINE))

    def has(self, name, beside="."):
        """Whether a file or folder is called `name`, from the root on or from the folder `beside` on, or ends so."""
        name, known = name.rstrip("/"), self.files | self.folders | self.of_readers
        return (name in known or os.path.normpath(os.path.join(beside, name)).replace(os.sep, "/") in known
                or any(one.endswith(f"/{name}") for one in known) or re.match(r"\.(?!\.)|measured", name) is not None)

    def has_module(self, module, name=""):
        """Whether a module of the project exists, and has that name. Other modules are torch's or the reader's."""
        path = module.replace(".", "/")
        top = path.split("/")[0]
        if f"{path}.py" in self.of_readers:
            return True
        if top not in self.folders and f"{top}.py" not in self.files:
            is_there = importlib.util.find_spec(top) is not None
            if module == top or name:  # a machine may lack a library of an extra
                return is_there or is_placeholder(module) or f'"{top}' in self.settings
            return is_there and importlib.util.find_spec(module) is not None
        file = next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self.files), None)
        if file is None:
            return path in self.folders and not name
        source = (self.root / file).read_text(encoding="utf-8")
        return not name or re.search(rf"\b{name}\b", source) is not None or f"{path}/{name}.py" in self.files


# --------------------------------------------------------------------------- checks: (page, project) -> (line, mistake)


def long_pages(page, project):
    most = MOST_WORDS.get(page.name, MOST_WORDS_ELSEWHERE)
    if page.n_words > most:
        yield 1, f"{page.n_words} words: it may have {most}"
    if page.name.split("/")[0] not in ("README.md", "results") and "<!-- report:" in page.text:
        yield 1, "a generated table: tables stand in results/"


def broken_links(page, project):
    for line, target in page.links:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # not of this project
        name, _, anchor = target.partition("#")
        path = page.path.parent / name if name else page.path
        if not path.exists():
            yield line, f"a link to {target}: there is no {name}"
        elif anchor and path.suffix == ".md" and anchor not in Page(path.resolve(), page.root.resolve()).anchors:
            yield line, f"a link to {target}: there is no such heading"
        elif re.fullmatch(r"L\d+", anchor) and int(anchor[1:]) > len(path.read_text(encoding="utf-8").splitlines()):
            yield line, f"a link to {target}: the file has fewer lines"


def unknown_names(page, project):
    """Files, folders and tests that are called by their names; in the first column of docs/names.md our names."""
    foreign = set(re.findall(r"\[`([^`]+)`\]\(https?:", page.text))
    for line, span in page.spans:
        if span in foreign or is_placeholder(span):
            continue
        if re.fullmatch(r"[\w./-]+(\.(py|md|svg|json|toml)|/)", span) and not span.startswith(("/", "~")):
            if not project.has(span, page.path.parent.relative_to(page.root).as_posix()):
                yield line, f"`{span}`: there is no such file or folder"
        elif re.fullmatch(r"test_\w+", span) and span not in project.tests:
            yield line, f"`{span}`: there is no such test"
    if page.name == "docs/names.md":
        there = set(re.findall(r"\w+", project.sources)) | {Path(file).stem for file in project.files}
        for line, (ours, *_) in page.rows:
            words = re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`]+)`", ours)))
            yield from ((line, f"`{word}`: there is no {word} in the code") for word in words if word not in there)


def wrong_samples(page, project):
    """Blocks of Python: whether they are Python, and what they import of the project, and call of its optimizers."""
    for first, lines in [(first, lines) for first, language, lines in page.blocks if language == "python"]:
        try:
            tree = ast.parse(textwrap.dedent("\n".join(lines).replace("…", "...")))
        except SyntaxError as error:
            yield first + (error.lineno or 1) - 1, f"this sample is no Python: {error.msg}"
            continue
        for node in ast.walk(tree):
            at = first + getattr(node, "lineno", 1) - 1
            modules = [(alias.name, "") for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [(node.module, alias.name) for alias in node.names]
            for module, name in modules:
                if not project.has_module(module, name):
                    yield at, f"import of {f'{name} from ' * bool(name)}{module}: there is no such thing"
            if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "optimizer"
                    and not re.search(rf"\b{node.attr}\b", project.sources)):
                yield at, f"optimizer.{node.attr}: no stage has that"


def wrong_commands(page, project):
    for line, command in page.commands():
        yield from ((line, f"{command}: {mistake}") for mistake in mistakes(command, project))


def mistakes(text, project):
    """Of one command. What stands in brackets may be left out."""
    try:
        words = shlex.split(text.replace("[", " ").replace("]", " "), comments=True)
    except ValueError as error:
        return [f"no shell reads that: {error}"]
    program, *rest = without_settings(words) or [""]
    if program == "make":
        return make_mistakes(rest, project)
    if program == "cp":
        sources = [word for word in rest[:-1] if not word.startswith("-") and not is_placeholder(word)]
        return [f"there is no {word}" for word in sources if not project.has(word)]
    if program == "torchrun" or program.endswith(("python", "python3")):
        return python_mistakes(rest, project)
    return [] if program in PROGRAMS else [f"the check of pages doesn't know {program!r}: see harness/docs_check.py"]


def make_mistakes(rest, project):
    """make itself says, by --dry-run, which target or value there is not."""
    values = dict(word.split("=", 1) for word in rest if re.match(r"[A-Z_]+=", word))
    found = [f"the Makefile has no variable {name}" for name in values if name not in project.variables]
    found += option_mistakes(shlex.split(values.pop("ARGS", "")), project)
    given = [f"{name}={value}".replace("my_package", "stage4_overlap") for name, value in values.items()]
    given = [word for word in given if not is_placeholder(word.partition("=")[2])]
    command = ["make", "--dry-run", *(word for word in rest if "=" not in word), *given, "PYTHON=true"]
    done = subprocess.run(command, cwd=project.root, capture_output=True, text=True)
    return found or (done.stderr.strip().splitlines()[-1:] if done.returncode else [])


def python_mistakes(rest, project):
    """Of the words behind python or torchrun."""
    rest = rest[2:] if rest[:2] == ["-m", "torch.distributed.run"] else rest
    scripts = [word for word in rest if word.endswith(".py")]
    module = rest[rest.index("-m") + 1] if "-m" in rest[:-1] else ""
    if any(map(is_placeholder, scripts)):
        return []
    if module and not project.has_module(module):
        return [f"there is no module {module}"]
    is_ours = scripts or module.split(".")[0] in project.folders
    return ([f"there is no {name}" for name in scripts if not project.has(name)]
            + (option_mistakes(rest, project) if is_ours else []))


def option_mistakes(rest, project):
    """Of what is given to a program: options that none has, and -k of pytest where no test is called so."""
    names = [word.split("=")[0] for word in rest if word.startswith("--")]
    wanted = {name for word, after in zip(rest, rest[1:]) if word == "-k" for name in re.findall(r"\w+", after)}
    known = project.tests | project.folders
    return [f"no program has the option {name}" for name in names if name not in project.options] + [
        f"no test is called {name}" for name in wanted - {"and", "or", "not"} if not any(name in one for one in known)]


CHECKS = (long_pages, broken_links, unknown_names, wrong_samples, wrong_commands)


def rows_twice(pages):
    """-> (page, line, mistake): rows of tables, and generated tables, that stand in more than one place."""
    seen = {}
    for page in pages:
        blocks = re.finditer(r"<!-- report: (\w+) -->", page.text)
        rows = [(page.text.count("\n", 0, match.start()) + 1, match[0]) for match in blocks]
        rows += [(line, " | ".join(filter(None, cells))) for line, cells in page.rows]
        for line, row in rows:
            first, at = seen.setdefault(row, (page, line))
            if row and (first is not page or row.startswith("<!--") and at != line):
                yield page, line, f"{row!r} stands in {first.name}:{at} already"


def problems(root=ROOT, text=""):
    """-> lines "PAGE:LINE: what is wrong", of pages whose name holds `text`."""
    project = Project(root)
    found = [(page, *mistake) for page in project.pages for check in CHECKS if text in page.name
             for mistake in check(page, project)]
    found += [(page, *rest) for page, *rest in rows_twice(project.pages) if text in page.name]
    return [f"{page.name}:{line}: {text}" for page, line, text in found]


def main():
    parser = command_line.Parser("docs", __doc__)
    parser.add_argument("--pages", default="", metavar="TEXT", help="only pages whose name holds TEXT")
    text = parser.parse_args().pages
    chosen = [page for page in Project().pages if text in page.name]
    if not chosen:
        parser.error(f"--pages {text!r}: no page has that in its name")
    found = problems(text=text)
    print(*found, *(f"{page.name}: {page.n_words} words" for page in chosen), sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
