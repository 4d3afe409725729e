"""Every page says what is there, as far as files tell: links, names, samples, commands, errors, and how long it is."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import checkpoint
from tests.common import STAGES
from tests.pages import PAGES, Page, program_of
from tests.ranks import ROOT

# Words of a page at the most: of docs/ all, elsewhere those outside of code and tables.
MOST_WORDS = {
    "README.md": 1000, "variants/README.md": 700, "docs/same_bits.md": 400, "docs/reference.md": 4600,
    "docs/exercise.md": 1700, "docs/guide.md": 1460, "docs/frameworks.md": 1050, "docs/checkpoints.md": 900,
    "docs/names.md": 760, "docs/questions.md": 2000, "docs/migrate.md": 1720, "docs/teaching.md": 300,
    "docs/incidents.md": 500, "docs/plan.md": 410, "docs/muon.md": 380, "docs/experts.md": 640}
# Options of torchrun and of pytest; those of our programs are read from their sources.
OPTIONS = set("--standalone --nproc-per-node --nnodes --node-rank --master-addr --master-port --max-restarts "
              "--rdzv-endpoint --rdzv-backend --rdzv-id --numprocesses --collect-only".split())

FILES = {path.relative_to(ROOT).as_posix() for names in ("*", "[!.]*/**/*") for path in ROOT.glob(names)}
SOURCES = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES if re.fullmatch(r"\w[^.]*\.py", name)}
ALL_CODE = "\n".join(SOURCES.values())
OUR_CODE = "\n".join(source for name, source in SOURCES.items() if not name.startswith("tests/"))
TESTS = {Path(name).stem for name in SOURCES if "tests/" in name} | set(re.findall(r"def (test_\w+)", ALL_CODE))
OPTIONS |= set(re.findall(r"[\"'](--[\w-]+)[\"']", ALL_CODE))
MAKEFILE = (ROOT / "Makefile").read_text()
VARIABLES = set(re.findall(r"[A-Z_]+", MAKEFILE))
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
OF_READERS = {name for page in PAGES for name in re.findall(  # files that a page has its reader save
    r"(?:^```python\n# |\b[Ss]ave [^.`]+ as `)(\w+\.py)\b", page.text, re.MULTILINE)}


def is_placeholder(text):
    return re.search(r"…|\.\.\.|my_|\b[A-Z]{2,}\b", text) is not None


def has(name, beside="."):
    """Whether a file or folder is called `name`, from the root on or from the folder `beside` on, or ends so."""
    name = name.rstrip("/")
    is_of_a_run = name.startswith("measured") or re.match(r"\.(?!\.)", name)
    is_there = (ROOT / name).exists() or (ROOT / beside / name).exists()
    return is_of_a_run or is_there or name in OF_READERS or any(file.endswith(f"/{name}") for file in FILES)


# ------------------------------------------------------------------------------------ checks: page -> (line, mistake)


def long_pages(page):
    n_words = len(page.text.split()) if page.name.startswith("docs/") else page.n_words
    most = MOST_WORDS.get(page.name, 9000)
    if n_words > most:
        yield 1, f"{n_words} words: it may have {most}"
    if not page.name.startswith(("README.md", "results/", "variants/")) and "<!-- report:" in page.text:
        yield 1, "a generated table: tables stand in results/ and variants/"


def broken_links(page):
    for line, target in page.links:
        if re.match(r"[a-z][a-z0-9+.-]*:|\.\./\.\./deployments/", target):
            continue  # not of this project, or a page that GitHub has of the repository, of a fork too
        name, _, anchor = target.partition("#")
        path = page.path.parent / name
        if name and not path.exists():
            yield line, f"a link to {target}: there is no {name}"
        elif anchor and (not name or path.suffix == ".md"):
            linked = Page(path.resolve().relative_to(ROOT).as_posix()) if name else page
            if anchor not in linked.anchors:
                yield line, f"a link to {target}: there is no such heading"


def unknown_names(page):
    """Files, folders and tests that are called by their names; in the first column of docs/names.md our names."""
    foreign = set(re.findall(r"\[`([^`]+)`\]\(https?:", page.text))
    for line, span in page.spans:
        if span in foreign or is_placeholder(span) or span.startswith(("/", "~")):
            continue
        if re.fullmatch(r"[\w./-]+(\.(py|md|svg|json|toml)|/)", span) and not has(span, Path(page.name).parent):
            yield line, f"`{span}`: there is no such file or folder"
        elif re.fullmatch(r"test_\w+", span) and span not in TESTS:
            yield line, f"`{span}`: there is no such test"
    there = set(re.findall(r"\w+", OUR_CODE)) | {Path(file).stem for file in FILES}
    for line, (ours, *_) in page.rows if page.name == "docs/names.md" else ():
        for code in re.findall(r"`([^`]+)`", ours):
            missing = set(re.findall(r"[A-Za-z_]\w*", code)) - there
            yield from ((line, f"`{word}`: there is no {word} in the code") for word in missing)


def wrong_commands(page):
    """Find targets and variables that the Makefile lacks, options that no program has, files that are missing."""
    for line, command in page.commands():
        program, *words = shlex.split(" ".join(program_of(re.sub(r"[\[\]]", " ", command))), comments=True)
        if program not in ("make", "torchrun", "python", "python3", ".venv/bin/python"):
            continue
        options = re.findall(r"(?<![\w-])--[a-z][\w-]*", command)
        wrong = [f"no program has the option {option}" for option in options if option not in OPTIONS]
        if program == "make":
            variables = [word.split("=")[0] for word in words if re.match(r"[A-Z_]+=", word)]
            targets = [word for word in words if re.fullmatch(r"[a-z-]+", word)]
            wrong += [f"the Makefile has no variable {name}" for name in variables if name not in VARIABLES]
            wrong += [f"the Makefile has no target {name}" for name in targets if name not in TARGETS]
        else:
            files = [word for word in words if word.endswith(".py") and not is_placeholder(word)]
            wrong += [f"there is no {name}" for name in files if not has(name)]
        for tests in re.findall(r"-k '?([\w ]+)", command):
            names = set(tests.split()) - {"and", "or", "not"}
            wrong += [f"no test is called {name}" for name in names if not any(name in test for test in TESTS | FILES)]
        module = re.search(r" -m (\w\S*)", command)
        # make take has written a package with a smoke_test
        if module and not module[1].endswith(".smoke_test") and not importlib.util.find_spec(module[1]):
            wrong.append(f"there is no module {module[1]}")
        yield from ((line, f"{command}: {mistake}") for mistake in wrong)


def cut_paragraphs(page):
    """Find comments at the start of a line with text behind them: Markdown ends the paragraph there."""
    for line, html in page.html:
        if html.startswith("<!--") and not re.fullmatch("<!--.*?-->", html.splitlines()[0].strip()):
            yield line, "a marker at the start of a line cuts the paragraph: move it into the line before"


def problems(page):
    """-> lines "PAGE:LINE: what is wrong"."""
    checks = long_pages, broken_links, unknown_names, wrong_commands, cut_paragraphs
    return [f"{page.name}:{line}: {mistake}" for check in checks for line, mistake in check(page)]


def test_every_page_says_what_is_there():
    mistakes = [mistake for page in PAGES for mistake in problems(page)]
    assert not mistakes, "\n".join(mistakes)
    names = {page.name for page in PAGES}
    assert {name for name in names if name.startswith("docs/")} <= MOST_WORDS.keys() <= names


@pytest.mark.parametrize("text, mistake", [
    ("[text](nowhere.md)", "a link to nowhere.md: there is no nowhere.md"),
    ("[text](docs/guide.md#nothing)", "a link to docs/guide.md#nothing: there is no such heading"),
    ("`hocks.py`", "`hocks.py`: there is no such file or folder"),
    ("`test_nothing`", "`test_nothing`: there is no such test"),
    ("- At 1 Gbit/s\n  <!--rate-->0.96<!--end--> of DDP's", "a marker at the start of a line cuts the paragraph"),
    ("`make train STAEG=4`", "the Makefile has no variable STAEG"),
    ('`make train ARGS="--stpes 3"`', "no program has the option --stpes"),
    ('`make test ARGS="-k wrong_word"`', "no test is called wrong_word")])
def test_a_mistake_is_named_with_its_line(text, mistake):
    (problem,) = problems(Page("page.md", text + "\n"))
    assert problem.startswith("page.md:") and mistake in problem


# ------------------------------------------------------------------------------------------------- the reference


REFERENCE = ROOT / "docs" / "reference.md"
RAISED = [path for folder in [*STAGES, "guard", "checkpoint"] for path in (ROOT / folder).rglob("*.py")
          if path.name not in ("train.py", "__main__.py")]  # their messages are about options, and name these


def is_error(call):
    """Whether the call makes an error: ValueError(…), pickle.UnpicklingError(…), DamagedCheckpoint(…)"""
    name = ast.unparse(call.func).split(".")[-1]
    return name.endswith("Error") or name in vars(checkpoint)


def texts(path, of_errors=False):
    """Return the strings of a file, with … for what is filled in; of module-level constants their values."""
    tree = ast.parse(path.read_text())
    constants = {ast.unparse(node.targets[0]): node.value.value for node in tree.body
                 if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)}

    def text_of(node):
        match node:
            case ast.Constant(value):
                return value if isinstance(value, str) else "…"
            case ast.JoinedStr(values):
                return "".join(map(text_of, values))
            case ast.FormattedValue(value):
                return str(constants.get(ast.unparse(value), "…"))

    nodes = list(ast.walk(tree))
    if of_errors:
        calls = [node for node in nodes if isinstance(node, ast.Call) and is_error(node)]
        nodes = [node for call in calls for argument in call.args for node in ast.walk(argument)]
    strings = [text_of(node) for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return [text for text in strings if text.strip("… ")]


def fragments(text):
    return [part.strip(" :;") for part in text.split("…") if part.strip(" :;")]


def test_errors_of_the_reference_are_those_of_the_code():
    """The page is found by searching for an error: what it shows is raised, and what is raised it shows. An error of
    ours is a line of a block of code, with `…` for what varies; one of torch begins with "torch:". Its contents name
    each group."""
    page = REFERENCE.read_text()
    code = "\n".join(text for folder in (*STAGES, "guard", "checkpoint", "harness")
                     for path in (ROOT / folder).rglob("*.py") for text in texts(path))
    shown = re.findall(r"^    (?!torch: )(.+)$", page, re.MULTILINE)
    assert len(shown) > 100
    unsaid = [fragment for line in shown for fragment in fragments(line) if fragment not in code]
    assert not unsaid, f"nothing in the code says {unsaid}"
    page = " ".join(page.split())
    longest = [max(fragments(text), key=len, default="") for path in RAISED for text in texts(path, of_errors=True)]
    # without a space in it, it only puts others together
    missing = [text for text in longest if " " in text and text not in page]
    assert not missing, f"docs/reference.md has no entry for {missing}"
    groups = re.findall(r"^## (.+)$", REFERENCE.read_text(), flags=re.MULTILINE)
    assert re.findall(r"^- \[(.+?)\]\(#", REFERENCE.read_text(), flags=re.MULTILINE) == groups
