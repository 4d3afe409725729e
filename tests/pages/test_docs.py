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
MOST_WORDS = {"README.md": 1000, "variants/README.md": 700, "docs/same_bits.md": 400,
              **{f"docs/{name}.md": most for name, most in (
                  ("reference", 4600), ("exercise", 1700), ("guide", 1460), ("frameworks", 1050), ("checkpoints", 900),
                  ("names", 760), ("questions", 2000), ("migrate", 1720), ("teaching", 300), ("incidents", 500),
                  ("plan", 410), ("muon", 380), ("experts", 640))}}
# Options of torchrun and of pytest; those of our programs are read from their sources.
OPTIONS = {"--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port",
           "--max-restarts", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--numprocesses", "--collect-only"}

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
    return (name in OF_READERS or (ROOT / name).exists() or (ROOT / beside / name).exists()
            or any(file.endswith(f"/{name}") for file in FILES) or re.match(r"\.(?!\.)|measured", name) is not None)


# ------------------------------------------------------------------------------------ checks: page -> (line, mistake)


def long_pages(page):
    n_words = len(page.text.split()) if page.name.startswith("docs/") else page.n_words
    if n_words > (most := MOST_WORDS.get(page.name, 9000)):
        yield 1, f"{n_words} words: it may have {most}"
    if not page.name.startswith(("README.md", "results/", "variants/")) and "<!-- report:" in page.text:
        yield 1, "a generated table: tables stand in results/ and variants/"


def broken_links(page):
    for line, target in page.links:
        name, _, anchor = target.partition("#")
        path = page.path.parent / name if name else page.path
        if re.match(r"[a-z][a-z0-9+.-]*:|\.\./\.\./deployments/", target):
            continue  # not of this project, or a page that GitHub has of the repository, of a fork too
        if name and not path.exists():
            yield line, f"a link to {target}: there is no {name}"
        elif anchor and path.suffix == ".md" and anchor not in (
                Page(path.resolve().relative_to(ROOT).as_posix()) if name else page).anchors:
            yield line, f"a link to {target}: there is no such heading"
        elif re.fullmatch(r"L\d+", anchor) and int(anchor[1:]) > len(path.read_text().splitlines()):
            yield line, f"a link to {target}: the file has fewer lines"


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
    for line, command in page.commands():
        yield from ((line, f"{command}: {mistake}") for mistake in mistakes(command))


def mistakes(command):
    """-> what is wrong with one command. What stands in brackets may be left out."""
    program, *rest = shlex.split(" ".join(program_of(re.sub(r"[\[\]]", " ", command))), comments=True)
    if program == "make":
        values = dict(word.split("=", 1) for word in rest if re.match(r"[A-Z_]+=", word))
        targets = [word for word in rest if re.fullmatch(r"[a-z-]+", word)]
        return [*(f"the Makefile has no variable {name}" for name in values if name not in VARIABLES),
                *(f"the Makefile has no target {name}" for name in targets if name not in TARGETS),
                *option_mistakes(shlex.split(values.get("ARGS", "")))]
    if program not in ("torchrun", "python", "python3", ".venv/bin/python"):
        return []
    scripts = [word for word in rest if word.endswith(".py") and not is_placeholder(word)]
    module = rest[rest.index("-m") + 1] if "-m" in rest[:-1] else ""
    if module.endswith(".smoke_test"):
        return []  # of a package that make take has written
    if module and not importlib.util.find_spec(module):
        return [f"there is no module {module}"]
    missing = [f"there is no {name}" for name in scripts if not has(name)]
    return missing + (option_mistakes(rest) if scripts or module.split(".")[0] in FILES else [])


def option_mistakes(rest):
    """Of what is given to a program: options that none has, and -k of pytest where no test is called so."""
    names = [word.split("=")[0] for word in rest if word.startswith("--")]
    wanted = {name for word, after in zip(rest, rest[1:]) if word == "-k" for name in re.findall(r"\w+", after)}
    return [f"no program has the option {name}" for name in names if name not in OPTIONS] + [
        f"no test is called {name}" for name in wanted - {"and", "or", "not"}
        if not any(name in one for one in TESTS | FILES)]


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
    found = [problem for page in PAGES for problem in problems(page)]
    assert not found, "\n".join(found)
    assert {page.name for page in PAGES if page.name.startswith("docs/")} <= MOST_WORDS.keys() <= {
        page.name for page in PAGES}


@pytest.mark.parametrize("text, mistake", [
    (9001 * "word ", "9001 words: it may have 9000"),
    ("[text](nowhere.md)", "a link to nowhere.md: there is no nowhere.md"),
    ("[text](docs/guide.md#nothing)", "a link to docs/guide.md#nothing: there is no such heading"),
    ("`hocks.py`", "`hocks.py`: there is no such file or folder"),
    ("`test_nothing`", "`test_nothing`: there is no such test"),
    ("- At 1 Gbit/s\n  <!--rate-->0.96<!--end--> of DDP's", "a marker at the start of a line cuts the paragraph"),
    ("`make train STAEG=4`", "make train STAEG=4: the Makefile has no variable STAEG"),
    ("`make tarin STAGE=4`", "make tarin STAGE=4: the Makefile has no target tarin"),
    ('`make train ARGS="--stpes 3"`', 'make train ARGS="--stpes 3": no program has the option --stpes'),
    ('`make test ARGS="-k wrong_word"`', 'make test ARGS="-k wrong_word": no test is called wrong_word'),
    ("`python -m guard.nothing`", "python -m guard.nothing: there is no module guard.nothing")])
def test_a_mistake_is_named_with_its_line(text, mistake):
    (found,) = problems(Page("page.md", text + "\n"))
    assert re.match(r"page.md:\d: ", found) and mistake in found


# ------------------------------------------------------------------------------------------------- the reference


REFERENCE = ROOT / "docs" / "reference.md"
RAISED = [path for folder in [*STAGES, "guard", "checkpoint"] for path in (ROOT / folder).rglob("*.py")
          if path.name not in ("train.py", "__main__.py")]  # their messages are about options, and name these


def texts(path, errors_only=False):
    """The strings of a file, with … for what is filled in; of module-level constants their values."""
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

    def makes_error(node):  # ValueError(…), pickle.UnpicklingError(…), DamagedCheckpoint(…)
        name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        return name.endswith("Error") or name in vars(checkpoint)
    roots = [one for call in ast.walk(tree) if makes_error(call) for one in call.args] if errors_only else [tree]
    found = [text_of(node) for root in roots for node in ast.walk(root)
             if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return [text for text in found if text.strip("… ")]


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
    longest = [max(fragments(text), key=len, default="") for path in RAISED for text in texts(path, errors_only=True)]
    # without a space in it, it only puts others together
    missing = [text for text in longest if " " in text and text not in page]
    assert not missing, f"docs/reference.md has no entry for {missing}"
    groups = re.findall(r"^## (.+)$", REFERENCE.read_text(), flags=re.MULTILINE)
    assert re.findall(r"^- \[(.+?)\]\(#", REFERENCE.read_text(), flags=re.MULTILINE) == groups
