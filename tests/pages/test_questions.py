"""docs/questions.md: every answer cites where people ask, its code is there, its programs and commands print that."""

import re
import subprocess
import sys

import pytest

from tests.pages import Page
from tests.pages.test_samples import fill, run_in
from tests.ranks import ROOT

PAGE = Page("docs/questions.md")
ANSWERS = dict(re.findall(r"^## ([^\n]+\?)\n(.*?)(?=^## |\Z)", PAGE.text, re.MULTILINE | re.DOTALL))
SAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE.text, re.MULTILINE | re.DOTALL)
COMMANDS = [code.splitlines() for code in PAGE.code("text") if code.startswith("make ")]
# A link whose text is code: a function or class, and the file that has it.
CODE = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", PAGE.text)


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_cites_a_thread_in_which_it_is_asked(question):
    assert re.search(r"\[[^]]*#\d+\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", ANSWERS[question])
    for number, target in re.findall(r"#(\d+)\]\(https://github\.com/[\w./-]+/(\d+)\)", ANSWERS[question]):
        assert number == target


@pytest.mark.parametrize("name, file", CODE)
def test_code_that_is_linked_is_in_that_file(name, file):
    source = (ROOT / file).read_text(encoding="utf-8")
    assert all(re.search(rf"\b(def|class) {part}\b", source) for part in name.split("."))


@pytest.mark.waits
@pytest.mark.parametrize("code, output", SAMPLES)
def test_a_sample_prints_what_stands_below_it(code, output, tmp_path):
    fill(tmp_path)
    ranks = run_in(tmp_path, code)
    assert [ended.code for ended in ranks] == [0, 0], ranks[0].stderr
    assert ranks[0].stdout == output


@pytest.mark.waits
@pytest.mark.parametrize("command, rows", [(command, rows) for command, *rows in COMMANDS])
def test_a_command_prints_the_rows_below_it(command, rows):
    made = subprocess.run(f"{command} PYTHON={sys.executable}", shell=True, cwd=ROOT, capture_output=True, text=True)
    printed = [line.split() for line in made.stdout.splitlines()]
    assert rows and all(row.split() in printed for row in rows), made.stdout + made.stderr


def test_the_page_has_samples_commands_and_links_to_code():
    assert len(ANSWERS) >= 9 and len(SAMPLES) == 2 and COMMANDS and len(CODE) > 5
