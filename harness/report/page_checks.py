"""What can be read off a page and the files: links, names, samples, quotations, rows that stand twice."""

import ast
import importlib.util
import re
import textwrap

from harness.report.markdown import Page
from harness.report.project_files import is_placeholder
from harness.report.reading_time import words

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
