"""Tables, pictures and sentences of the pages are those of results/*.json; and what you have measured beside them."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from harness.measuring import every_row, links
from harness.planning import plan, replay
from harness.publishing import figures, pages, results, row_names, stages, tables
from harness.publishing.results import AccumulatedRow, Accumulation, RecordedStep, Row
from harness.publishing.row_names import ONE_PARAMETER, RowId
from harness.publishing.tables import NONE, cells_of, sheet_text
from harness.training import rows as catalogue
from tests.ranks import git, run_module

HERE, read = results.ROOT, results.load


# ------------------------------------------------------------------------------------------------------- what pages say


# What the plan assumes, and sizes that we chose: no measurement changes them.
TYPED = {"plan.md": {"80 GB", "2 %"}, "methods.md": {"100 GB"}}


@pytest.mark.parametrize("path", pages.files(), ids=lambda path: f"{path.parent.name}/{path.name}")
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
    path, drawn = HERE / "results" / name, pages.PICTURES[name]()
    text = path.read_text() if path.exists() else ""  # of what was not measured there is none
    if re.findall(r"Matplotlib v[\d.]+", drawn) != re.findall(r"Matplotlib v[\d.]+", text):
        drawn, text = (re.findall(r"<text[^>]*>(.*?)</text>", svg) for svg in (drawn, text))
    assert drawn == text, "run make report"


def test_every_block_stands_once_and_every_figure_somewhere_and_an_unknown_one_is_an_error():
    text = "".join(path.read_text() for path in pages.files())
    assert sorted(re.findall(r"<!-- report: (\w+) -->", text)) == sorted(pages.BLOCKS)
    assert pages.figures().keys() <= set(re.findall(r"<!--(\w+)-->", text))
    text = (HERE / "results" / "README.md").read_text()
    at = text.index("8 + 8/d")
    assert pages.rewritten(text[:at] + text[at:].replace("12.00", "11.00", 1)) == text
    assert "<!--ddp_7b-->1<!--end-->" not in pages.rewritten("<!--ddp_7b-->1<!--end-->")
    with pytest.raises(KeyError):
        pages.rewritten("<!-- report: nothing -->\n<!-- end -->\n")


def test_what_pages_say_of_the_plan_is_so():
    assert replay.DEVICES["a100"].between == 100e9 and plan.AS_FAST == 1.02
    sheets, larger = (read(name).sheets for name in ("plan.json", "plan_70b.json"))
    ms, fits = sheets["ranks"].numbers("1024"), sheets["memory"].numbers("fits_from")
    assert sorted((name for name in ms if fits[name]), key=ms.get)[:3] == [
        "hybrid of 64 bf16", "stage 4 bf16", "stage 3 bf16/bf16"]
    once, each = (sheets["time"].numbers(key)["stage 4 bf16"] for key in ("once", "each"))
    assert each == pytest.approx(once, rel=0.02)
    for of_ranks in (sheets["ranks"].numbers(column.key) for column in sheets["ranks"].columns[1:]):
        assert all(of_ranks[base] > 1.02 * of_ranks["stage 4 bf16"] for base in ("owner reduce bf16", "ddp bf16"))
    fits_70b, ms_70b = larger["memory"].numbers("fits_from"), larger["ranks"].numbers("1024")
    assert not fits["ddp bf16"] and not fits_70b["ddp bf16"]
    fastest = min(ms_70b, key=ms_70b.get)
    assert fastest == "hybrid of 64 bf16" and fits_70b[fastest]


def test_all_figures_but_the_gpus_are_of_one_commit():
    """As `make figures` leaves them."""
    names = {step.file for step in figures.STEPS}
    assert {path.name for path in (HERE / "results").glob("*.json")} == names | set(pages.GPUS)
    commits = {name: {made.commit for _, made in results.provenance(read(name))} for name in names}
    assert len(set().union(*commits.values())) == 1, commits


def test_how_long_an_evening_is():
    """As README says of each chapter with its core, in steps of five minutes; and all of it in three hours."""
    def words(page):
        return re.sub(r"<!-- report: .*?<!-- end -->", "", (HERE / page).read_text(), flags=re.DOTALL).split()
    typed = re.findall(r"\[(?:chapter )?\d\]\([^)]*\)(?: takes)? (\d+)", " ".join(words("README.md")))
    folders = [rung.folder for rung in pages.LADDER if rung.folder]
    found = [len(words(f"{folder}/README.md")) / 200 + stages.core_lines(HERE / folder) / 5 for folder in folders]
    assert [int(minutes) for minutes in typed] == pytest.approx(found, abs=5) and len(typed) == 4
    assert sum(found) + len(words("README.md")) / 200 <= 180, "an evening has three hours"


# --------------------------------------------------------------------------------------------------------------- tables


@pytest.fixture
def result():
    """That of bench.py, without any times but those of ddp, of ddp again and of stage 1: two rounds each."""
    result = read("bench.json")
    for row in result.rows:
        row.rounds_ms, row.vs_reference = [], None
    times = {"ddp": [100, 200], "stage 1 naive broadcast": [105, 210], "ddp again": [104, 190]}
    for row in map(result.find, times):
        row.rounds_ms = times[row.base]
        row.vs_reference = row.over(result.find("ddp"))
    result.conditions.noise = [1.04, 0.95]
    return result


def cells(out, name):
    return next(line for line in out.splitlines() if line.startswith(name)).split()


def fits(sheet, columns=100):
    text = sheet_text(sheet, columns)
    return max(map(len, text.splitlines())) <= columns and "…" not in text


def test_what_lies_within_the_noise_is_marked(result, capsys):
    """5 % from ddp: as far as ddp is from itself in the second round. And 6 % is further than that."""
    result.find("ddp").timeline = [RecordedStep(0.012), RecordedStep(0.034)]
    every_row.show(result)
    out = capsys.readouterr().out
    assert "1.05~" in cells(out, "stage 1 naive broadcast") and "1.00" in cells(out, "ddp  ")
    assert "took 0.95 to 1.04 times as long" in " ".join(out.split())
    assert out.count("ddp again") == 1  # beside the times, and not beside the memory
    assert "34" in cells(out, "ddp  ")  # exposed communication: of the rank with more of it
    result.find("stage 1 naive broadcast").vs_reference = 1.06
    every_row.show(result)
    assert "1.06" in cells(capsys.readouterr().out, "stage 1 naive broadcast")
    assert all(map(fits, every_row.sheets(result)))


def test_memory_has_columns_for_what_was_counted(result):
    """On CUDA what the allocator took; its kinds in a sheet of their own, with dashes where none were counted."""
    result.conditions.device = "cuda"
    for row in result.rows:
        row.memory_bytes["reserved"] = 314.2e6
        row.peak_bytes, row.held_bytes, row.activation_bytes = {}, {}, None
    (memory,) = every_row.memory_sheets(result)
    (reserved,) = [column for column in memory.columns if column.key == "reserved"]
    assert fits(memory, tables.WIDTH) and reserved.source == "counted"
    assert cells(sheet_text(memory, tables.WIDTH), "stage 1 naive broadcast").count("314.2") == 1
    stage4 = result.find("stage 4 overlap")
    stage4.peak_bytes, stage4.activation_bytes = dict.fromkeys(("build", "forward", "backward", "step"), 7e6), 5.55e7
    stage4.held_bytes = dict(zip(("parameters", "gradients", "state", "buffers"), (1.5e10, 2e7, 3e7, 4e7)))
    _, kinds = every_row.memory_sheets(result)
    found = {row[0]: row[1:] for row in cells_of(kinds)}
    assert found["ddp"] == [NONE] * 9 and "ddp again" not in found and fits(kinds)
    assert found["stage 4 overlap"] == ["7.0"] * 4 + ["15000", "20.0", "30.0", "40.0", "55.5"]


def test_a_row_that_failed_has_no_line_and_says_why():
    result = read("network.json")
    result.rows[result.rows.index(result.find("fsdp2"))] = Row("fsdp2", kind="peer", error="rank 1: it broke")
    text = sheet_text(links.link_sheet(result))
    assert cells(text, "fsdp2") == ["fsdp2", *[NONE] * 6] and "fsdp2: rank 1: it broke" in text
    assert all(fits(links.link_sheet(one)) for one in results.at_all_rates())


def test_accumulation_marks_noise_and_says_what_communication_takes():
    """One micro-batch, both ways the same: 4 % apart, so 1.03 is noise, and 1.05 is not. Computing takes 20 ms."""
    each = [96, 100, 101], [106, 105, 105], [103, 103, 103]
    exchanges, shares = links.accumulation_sheets(Accumulation(None, [
        AccumulatedRow(k, [100] * 3, times, [20], ddp, stage3)
        for k, times, ddp, stage3 in zip((1, 2, 4), each, ([80], [32], [25]), ([100], [50], [40]))], ddp_mb=2))
    assert [row[-1] for row in cells_of(exchanges)] == ["1.00~", "1.05", "1.03~"]
    assert "up to 4% apart" in exchanges.footnotes[-1]
    assert cells_of(shares) == [["1", "20", "75%", "80%", "80%"], ["2", "20", "38%", "60%", "80%"],
                           ["4", "20", "20%", "50%", "80%"]]
    assert "the row ddp, 2 MiB buckets" in shares.notes[0]


def ladder():
    """Return {title: cells} of README's table."""
    return {title: cells for title, *cells in cells_of(pages.ladder_sheet())}


def test_the_ladder_has_bytes_of_the_formula_and_dashes_for_what_failed(monkeypatch):
    """On the slowest line with all rows. Its figures in README are those of results/, see above."""
    slowest = results.by_rate()[0]
    for rung in pages.LADDER:
        travels = slowest.find(rung.row).wire_bytes_theory / (2 * slowest.conditions.parameters)
        assert int(ladder()[rung.title][3]) == pytest.approx(travels, rel=1e-4)
    slowest.rows[slowest.rows.index(slowest.find("stage 3 grad buffer"))] = Row("stage 3 grad buffer")
    monkeypatch.setattr(results, "by_rate", lambda: [slowest])
    assert ladder()["3 grad buffer"][2:4] == [NONE, "2"] and ladder()["3 grad buffer"][5] == NONE


def test_whoever_is_ahead_is_so_of_the_tuned_ddp(monkeypatch):
    """Or of the default one, where no sweep was made, or where no size of it was better."""
    tuned, best = results.by_rate()[0], row_names.tuned_row(results.by_rate()[0], "ddp")
    untuned = dataclasses.replace(tuned, sweep=None, rows=[row for row in tuned.rows if row.bucket_mb is None])
    default = untuned.find("ddp")
    default_is_best = dataclasses.replace(untuned, sweep=dataclasses.replace(tuned.sweep, rows=[default]))
    for one, ddp, words in ((untuned, default, "DDP's with its default buckets"),
                            (default_is_best, default, "tuned DDP's (default buckets)"),
                            (tuned, best, f"tuned DDP's ({best.size} buckets)")):
        monkeypatch.setattr(results, "by_rate", lambda: [one])
        ratio = f"{one.find('stage 4 overlap').over(ddp):.2f}"
        assert ladder()["4 overlap"][-1] == ratio and words in pages.ladder_sheet().notes[0]
        assert dict(cells_of(links.curve_sheet([one])))["stage 4 over tuned DDP"] == (ratio if one.sweep else NONE)


def test_the_curve_has_a_dash_for_a_row_that_failed():
    slowest = results.by_rate()[0]
    slowest.rows[slowest.rows.index(slowest.find("fsdp2"))] = Row("fsdp2", kind="peer", error="it broke")
    found = dict(cells_of(links.curve_sheet([slowest])))
    assert found["FSDP2"] == NONE != found["DDP, default buckets"]


def test_a_sweep_is_drawn_by_size_and_without_one_there_is_no_picture():
    rows = [Row("ddp", mb, rounds_ms=[ms]) for mb, ms in ((2, 7), (None, 9), (1, 8))]
    assert links.swept_times(rows, "ddp") == [(2, 8), (3, 7), (6, 9)]  # the default is 25 MB
    slowest = results.by_rate()[0]
    assert fits(links.buckets_sheet(slowest.sweep))
    assert links.sweep_picture([dataclasses.replace(slowest, sweep=None)]) == ""


def test_the_rows_of_a_tuned_size_stand_behind_the_default():
    tuned = [RowId("ddp", 2), RowId("ddp + stage 1", 4)]
    assert row_names.with_tuned([RowId("ddp"), RowId("fsdp2")], tuned) == [
        RowId("ddp"), tuned[0], RowId("fsdp2"), tuned[1]]
    assert all(catalogue.find(*row_id).name == row_id.base for row_id in row_names.SWEPT + row_names.SWEPT_FOR_CURVE)
    assert set(row_names.SWEPT_FOR_CURVE) < set(row_names.SWEPT)
    assert [RowId("ddp", size).name for size in (None, 2.0, 0.25, ONE_PARAMETER)] == [
        "ddp", "ddp, 2 MiB buckets", "ddp, 0.25 MiB buckets", "ddp, one-parameter buckets"]


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """-> a folder with copies of the results and of the pages that show them, for `harness.publishing.pages`."""
    for path in HERE.iterdir():
        if path.name in ("docs", "results", "README.md"):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
        elif path.name.startswith("stage"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "measured").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["report"])
    return tmp_path


def test_a_bench_that_cant_be_shown_is_refused_in_one_line_and_nothing_is_written(shown):
    """No json, another schema or shape; what --quick and --rows leave out, a row that failed, another device."""
    path, page = shown / "results" / "bench.json", shown / "results" / "README.md"
    whole, failed, on_gpu = (read("bench.json") for _ in range(3))
    failed.find("stage 1 naive broadcast").fail("rank 0: it broke")
    on_gpu.conditions.device = "cuda"
    parts = [dataclasses.replace(whole, **left) for left in (
        {"sheets": {}}, {"sheets": {"gathered": whole.sheets["gathered"]}}, {"host": {}}, {"rows": whole.rows[:2]})]
    again, a_part = "bench.json can't be shown: measure it again .*", "bench.json is a part of the bench"
    for text, says in (
            ("", f"{again}it is no json"), ("[1]", f"{again}it has no schema"), ("{}", f"{again}it has no schema"),
            ('{"schema": 0}', f"{again}its schema is 0, this program's is 2"),
            ('{"schema": 2, "conditions": {}, "rows": 3}', f"{again}Result.conditions.machine: Field required"),
            (json.dumps({**json.loads(results.to_json(whole)), "more": 1}),
             f"{again}Result.more: Unexpected keyword argument"),
            *((results.to_json(part), a_part) for part in (*parts, failed)),
            (results.to_json(on_gpu), "bench.json must be measured with device cpu")):
        path.write_text(text)
        with pytest.raises(SystemExit, match=f"^report: .*{says}.*$"):
            results.load_bench()
    page.write_text(before := page.read_text(encoding="utf-8").replace("12.00", "11.00"), encoding="utf-8")
    for damage, says in ((path.unlink, f"{again}No such file"), (path.mkdir, f"{again}Is a directory")):
        damage()
        with pytest.raises(SystemExit, match=f"^report: .*{says}"):
            pages.main()
        assert page.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("name", [path.name for path in (HERE / "results").glob("*.json")])
def test_what_is_read_is_written_as_it_was(name):
    text = (results.ROOT / "results" / name).read_text(encoding="utf-8")
    assert json.loads(results.to_json(results.load(name))) == json.loads(text)


# ------------------------------------------------------------------------------------- yours, and all of them anew


def test_yours_stand_beside_the_published_ones_and_change_none(shown, capsys):
    """A bench, and a network run at a rate that nobody has published. They stay where they are."""
    theirs, mine, network = read("bench.json"), read("bench.json"), results.at_all_rates()[0]
    mine.find("stage 4 overlap").vs_reference = 0.42
    mine.conditions.date = "3000-01-01"
    network.conditions.rate, network.conditions.bits_per_second, network.sweep = "9gbit", 9e9, None
    own = [(name, read(name)) for name in ("faults.json", "plan.json")]
    for name, result in (("bench.json", mine), ("network_variants.json", network), *own):
        (shown / "measured" / name).write_text(results.to_json(result), encoding="utf-8")
    before = {path: path.read_bytes() for path in shown.glob("*/*.json")}
    pages.main()
    assert before == {path: path.read_bytes() for path in shown.glob("*/*.json")}
    out, found = capsys.readouterr().out, pages.measured_sheets()
    bench, network, faults, *_ = [sheet_text(sheet, tables.WIDTH) for sheet in found]
    assert bench.splitlines()[0] == "Yours beside the published ones: bench.json" and bench.splitlines()[0] in out
    assert cells(bench, "stage 4 overlap ")[5:7] == [f"{theirs.find('stage 4 overlap').vs_reference:.2f}", "0.42"]
    assert "3000-01-01" in bench and "Yours beside the published ones: network_variants.json, 9gbit" in network
    assert "Published: none at this rate" in network and cells(network, "ddp ")[1] == NONE
    assert faults.startswith("Yours: Faults")
    assert all(fits(sheet, tables.WIDTH) for sheet in found)


def test_a_bench_is_compared_with_the_one_of_its_device_and_dtype():
    mine = read("bench.json")
    for device, dtype, target in (("cpu", "float32", "bench.json"), ("cuda", "float32", "bench_cuda.json"),
                                  ("cpu", "bfloat16", "bench_bfloat16.json")):
        mine.conditions.device, mine.conditions.dtype = device, dtype
        assert pages.published_file("bench.json", mine) == target


def test_figures_go_on_where_they_stopped(shown, monkeypatch, capsys):
    """Of network.json the link of 1 Gbit/s is of this commit, and so is its sweep: that step is left out."""
    network = read("network.json")
    for rate, made in results.provenance(network):
        made.commit = "now" if rate == "1gbit" else "before"
    path = shown / "results" / "network.json"
    path.write_text(results.to_json(network))
    ran = []
    monkeypatch.setattr(figures, "run", ran.append)
    monkeypatch.setattr(results, "commit", lambda: "now")
    figures.main()
    assert len(ran) == len(figures.STEPS) - 1 + len(figures.REPORT) and path.exists()
    assert "there  two hosts, 1 Gbit/s" in capsys.readouterr().out
    monkeypatch.setattr(results, "commit", lambda: "now+")
    with pytest.raises(SystemExit):
        figures.main()


@pytest.mark.waits
def test_a_run_leaves_the_checkout_clean_in_a_terminal_that_knows_ascii_only(tmp_path):
    """As in a fresh clone: `make bench`, then what `make report` calls, then `git status` has nothing to say."""
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", "measured", "runs")
    copy, python = shutil.copytree(HERE, tmp_path / "copy", ignore=ignored), f"PYTHON={sys.executable}"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}

    def call(*command):
        done = subprocess.run(command, cwd=copy, env={**os.environ, **ascii_only}, capture_output=True, text=True,
                              timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        git(copy, *command)
    small = "--quick --model nano --sequence-length 16 --batch-size 2 --rows compute --ranks 1"
    assert "|?|" in call("make", "bench", f"ARGS={small}", python) and (copy / "measured" / "bench.json").exists()
    shows_results, *others = call("make", "--dry-run", "report", python).splitlines()
    printed = call(*shows_results.split())
    assert "Yours beside the published ones" in printed and "README.md: unchanged" in printed
    for program in others:  # in forked processes: each would import torch anew
        module, *arguments = program.removeprefix(f"{sys.executable} -m ").split()
        ended = run_module(module, *arguments, cwd=copy, limit_s=1200)
        assert ended.code == 0, ended.stderr
        printed += ended.stdout
    assert "watch.html" in printed and others[-1].endswith("-m variants --page")
    assert git(copy, "status", "--porcelain") == ""
