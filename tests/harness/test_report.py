"""Tables, pictures and sentences of the pages are those of results/*.json."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pytest

from harness.planning import plan
from harness.publishing import pages, stages, tables
from harness.publishing.tables import Marked, Report, Sheet, beside, cell_text, column, load, name_column, sheet_of

ROOT = tables.ROOT
# What the plan assumes, and sizes that we chose: no measurement changes them.
# Figures of others, or assumed; questions.md quotes threads of trackers.
TYPED = {"plan.md": {"80 GB"}, "methods.md": {"100 GB"},
         "questions.md": {"8900 MB", "2 GB", "7 GB", "250 MB", "125 MB"}}


@pytest.mark.parametrize("path", pages.marked_pages(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_block_is_that_of_its_json_and_no_other_figure_is_typed_into_the_prose(path):
    """What was measured stands between marks, where `make report` changes it. Chapters predict: test_chapters."""
    text = path.read_text()
    assert pages.rewritten(text) == text, "run make report"
    versions = r"Python ≥ [\d.]+|torch [\d.]+ to [\d.]+"
    marked = r"<!-- report: .*?<!-- end -->|<!--\w+-->.*?<!--end-->"
    text = re.sub(rf"{marked}|```.*?```|`[^`]*`|{versions}", "", text, flags=re.DOTALL)
    prose = " ".join(" ".join(line for line in text.splitlines() if not line.startswith("    ")).split())
    found = re.findall(r"\b\d+ ?(?:ms|MB|GB|%|s\b|seconds|hours)|\b\d+\.\d\d+\b", prose)
    assert set(found) <= TYPED.get(path.name, set()), path.name


@pytest.mark.parametrize("name", pages.PICTURES)
def test_every_picture_agrees_with_its_json(name):
    """To the byte by the matplotlib that drew it, and in its words by any other."""
    drawn = pages.PICTURES[name]()
    text = (ROOT / "results" / name).read_text()
    if re.findall(r"Matplotlib v[\d.]+", drawn) != re.findall(r"Matplotlib v[\d.]+", text):
        drawn, text = (re.findall(r"<text[^>]*>(.*?)</text>", svg) for svg in (drawn, text))
    assert drawn == text, "run make report"


def test_pages_show_every_picture_in_two_themes():
    names = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
    for path in (ROOT / name for name in names):
        text = path.read_text(encoding="utf-8")
        shown = re.findall(r'<img src="([^"]+)\.svg"', text)
        pairs = re.findall(r'scheme: dark\)" srcset="([^"]+)_dark\.svg">\n<img src="([^"]+)\.svg"', text)
        assert pairs == [(name, name) for name in shown] and not re.search(r"!\[.*\.svg", text), path.name
        assert all((path.parent / f"{name}{theme}.svg").exists() for name in shown for theme in ("", "_dark"))


def test_an_unknown_block_is_an_error_and_what_stands_between_marks_is_written_anew():
    text = (ROOT / "results" / "README.md").read_text()
    at = text.index("8 + 8/d")
    assert pages.rewritten(text[:at] + text[at:].replace("12.00", "11.00", 1)) == text
    assert "<!--ddp_7b-->1<!--end-->" not in pages.rewritten("<!--ddp_7b-->1<!--end-->")
    with pytest.raises(KeyError):
        pages.rewritten("<!-- report: nothing -->\n<!-- end -->\n")


def test_what_pages_say_of_the_plan_is_so():
    def fitting_by_ms(file):
        """Return the rows that fit into a device, the fastest first."""
        time = load(file).sheets["time"]
        peak_gb = time.numbers("peak")
        ms = time.numbers("ms")
        return sorted((name for name in ms if peak_gb[name] <= plan.DEVICE_BYTES / 1e9), key=ms.get)

    rows = fitting_by_ms("plan.json")
    rows_70b = fitting_by_ms("plan_70b.json")
    assert rows[:3] == ["hybrid of 64 bf16", "stage 4 bf16", "stage 3 bf16/bf16"]
    assert rows_70b[:3] == ["hybrid of 64 bf16", "stage 3 bf16/bf16", "stage 4 bf16"]
    assert "ddp bf16" not in rows + rows_70b
    time = load("plan.json").sheets["time"]
    once = time.numbers("once")["stage 4 bf16"]
    assert time.numbers("each")["stage 4 bf16"] == pytest.approx(once, rel=0.02)


def test_all_figures_are_of_one_commit_but_those_of_a_gpu_of_muon_and_of_the_plan():
    """As `make figures` leaves them. The tables of a GPU have their commit below them."""
    names = {step.file for step in pages.STEPS}
    assert {path.name for path in (ROOT / "results").glob("*.json")} == {*names, pages.GPU_FILE}
    # Muon's rows had failed at that commit, and the plan, which times nothing, was changed later: results/README.md.
    of_muon = {name for name in names if "muon" in name}
    of_plan = {name for name in names if "plan" in name}
    assert len({load(name).made.commit for name in names - of_muon - of_plan}) == 1
    assert len({load(name).made.commit for name in of_muon}) == 1


def test_how_long_an_evening_is():
    """As README says of each chapter with its core, in steps of five minutes; and all of it in three hours."""
    def words(page):
        return re.sub(r"<!-- report: .*?<!-- end -->", "", (ROOT / page).read_text(), flags=re.DOTALL).split()
    typed = re.findall(r"\[(?:chapter )?\d\]\([^)]*\)(?: takes)? (\d+)", " ".join(words("README.md")))
    found = [len(words(f"{folder}/README.md")) / 200 + stages.core_lines(ROOT / folder) / 5
             for folder in pages.CORES.values()]
    assert [int(minutes) for minutes in typed] == pytest.approx(found, abs=5) and len(typed) == 4
    assert sum(found) + len(words("README.md")) / 200 <= 180, "an evening has three hours"


# --------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("cell, shows, text", [
    (None, "median", "–"), ([], "both", "–"), ("words", "median", "words"), (1.234, "median", "1.23"),
    (Marked(1.0, "~"), "median", "1.00~"), ([1, 2, 6], "median", "2.00"), ([1, 2, 6], "range", "1.00–6.00"),
    ([1, 2, 6], "both", "2.00 (1.00–6.00)")])
def test_a_cell_is_written_so(cell, shows, text):
    assert cell_text(cell, ".2f", shows) == text


def test_a_mark_that_a_cell_has_is_explained_and_tables_stand_beside_each_other_by_row():
    left = sheet_of("left", ["a", "b"], {
        "name": name_column(str), "x": column("x", lambda row: Marked(2e6, "*") if row == "b" else None, unit=1)},
        marks={"*": "a reason.", "~": "no cell has it."})
    right = sheet_of("right", ["b"], {"name": name_column(str), "y": column("y", len)})
    assert left.footnotes == ["* a reason."] and left.numbers("x") == {"a": None, "b": 2e6}
    joined = beside("both", left, right)
    assert joined.rows == [["a", None, None], ["b", Marked(2e6, "*"), 1]] and joined.footnotes == left.footnotes


@pytest.mark.parametrize("name", [path.name for path in (ROOT / "results").glob("*.json")])
def test_what_is_read_is_written_as_it_was(name):
    text = (ROOT / "results" / name).read_text(encoding="utf-8")
    assert json.loads(tables.to_json(load(name))) == json.loads(text)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Return a folder with copies of the results and of the pages that show them, in place of the repository."""
    for name in ("docs", "results", "variants"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    for stage in pages.CORES.values():
        (tmp_path / stage).symlink_to(ROOT / stage)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["report"])
    return tmp_path


def test_a_file_that_cant_be_shown_is_refused_in_one_line_and_nothing_is_written(copied):
    """No json, another schema or other fields; a part of the bench; no file."""
    path = copied / "results" / "bench.json"
    page = copied / "results" / "README.md"
    whole = load("bench.json")
    part = dataclasses.replace(whole, sheets={"rows": whole.sheets["rows"]})
    page.write_text(before := page.read_text(encoding="utf-8").replace("12.00", "11.00"), encoding="utf-8")
    for text, says in (
            ("", "bench.json can't be shown.*Expecting value"),
            ('{"schema": 2}', "its schema is 2, this program's is 3"),
            ('{"schema": 3, "made": {}}', "it has other fields"),
            (tables.to_json(part), "a part of what was to be measured"), (None, "No such file")):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(SystemExit, match=f"^report: .*{says}"):
            pages.main()
        assert page.read_text(encoding="utf-8") == before


def test_figures_go_on_where_they_stopped(copied, monkeypatch, capsys):
    """Of one file the figures are of this commit: its step is left out. Code that isn't committed is refused."""
    report = load("network_1gbit.json")
    named = dataclasses.replace(report, made=report.made._replace(commit="now"))
    (copied / "results" / "network_1gbit.json").write_text(tables.to_json(named))
    ran = []
    monkeypatch.setattr(pages, "run", ran.append)
    monkeypatch.setattr(tables, "commit", lambda: "now")
    monkeypatch.setattr(sys, "argv", ["report", "--measure"])
    pages.main()
    assert len(ran) == len(pages.STEPS) and "there  two hosts, 1 Gbit/s" in capsys.readouterr().out
    monkeypatch.setattr(tables, "commit", lambda: "now+")
    with pytest.raises(SystemExit):
        pages.main()


def test_a_report_keeps_all_that_it_has():
    made = tables.Made("machine", "2", "abc", "today")
    report = Report(made, {"a": Sheet("a", [], ["x"], [[1.5, Marked(2.0, "~"), [1.0, 2.0], None, "words"]])},
                    "conditions", {"name": "1"}, {"raw": [1.0]})
    assert tables.from_json(tables.to_json(report)) == report
