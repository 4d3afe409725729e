"""The tables and pictures in README.md and the chapters are those of results/*.json."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from harness import pages, pictures, results, tables
from harness import rows as catalogue
from harness.results import (
    AccumulatedRow,
    Accumulation,
    FaultResult,
    GpuResult,
    MutationResult,
    PlanResult,
    RecordedStep,
    Result,
    Row,
    Sweep,
)
from harness.rows import ONE_PARAMETER, Choice
from harness.tables import (
    NONE,
    accumulation_sheet,
    buckets_sheet,
    line_sheet,
    memory_sheets,
    rate_words,
    share_sheet,
    sheet_text,
)
from tests.ranks import run_module

HERE = results.ROOT
IGNORED = shutil.ignore_patterns(".venv", ".git", "__pycache__", "tests", "measured", "runs")
IGNORED_IN_A_CLONE = shutil.ignore_patterns(".venv", ".git", "__pycache__", "measured", "runs")


@pytest.fixture(scope="session")
def committed(tmp_path_factory):
    """A copy of the project with results/ as committed: `make bench` has written a reader's own into this one."""
    root = shutil.copytree(HERE, tmp_path_factory.mktemp("committed") / "copy", ignore=IGNORED)
    for path in (root / "results").glob("*.json"):
        git = subprocess.run(["git", "show", f"HEAD:./results/{path.name}"], cwd=HERE, capture_output=True, timeout=300)
        if git.returncode == 0:  # else this is no clone
            path.write_bytes(git.stdout)
    return root


@pytest.fixture(autouse=True)
def of_what_is_committed(committed, monkeypatch):
    monkeypatch.setattr(results, "ROOT", committed)


@pytest.mark.parametrize("path", pages.files(), ids=lambda path: path.parent.name + "/" + path.name)
def test_every_block_agrees_with_its_json(path, monkeypatch):
    text = path.read_text()
    if pages.rewritten(text) != text:
        monkeypatch.setattr(results, "ROOT", HERE)  # with what is measured anew, and not committed yet
        assert pages.rewritten(text) == text, "run make report"


@pytest.mark.parametrize("name", pages.PICTURES)
def test_every_picture_agrees_with_its_json(name, monkeypatch):
    path = HERE / "results" / name
    text = path.read_text() if path.exists() else ""  # of what was not measured there is none
    if pages.PICTURES[name]() != text:
        monkeypatch.setattr(results, "ROOT", HERE)
        assert pages.PICTURES[name]() == text, "run make report"


def test_every_block_is_in_the_readme_or_among_the_results_once():
    names = [name for path in pages.files() for name in re.findall(r"<!-- report: (\w+) -->", path.read_text())]
    assert sorted(names) == sorted([*pages.BLOCKS, *pages.MARKDOWN])


@pytest.mark.parametrize("path", [path for path in pages.files() if "stage" not in path.parent.name],
                         ids=lambda path: path.parent.name + "/" + path.name)
def test_no_figure_is_typed_into_the_prose(path):
    """What was measured stands between the marks, where `make report` changes it. Chapters predict: test_chapters."""
    versions = r"Python ≥ [\d.]+|torch [\d.]+ to [\d.]+"
    text = re.sub(rf"<!-- report: .*?<!-- end -->|```.*?```|`[^`]*`|{versions}", "", path.read_text(), flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    assert re.findall(r"\b\d+ ?(?:ms|MB|GB|%|s\b|seconds|minutes|hours)|\b\d+\.\d\d+\b", prose) == [], path.name


def test_a_figure_that_somebody_typed_is_found():
    text = pages.rewritten((results.ROOT / "results" / "README.md").read_text())
    at = text.index("ddp + stage 1")
    assert pages.rewritten(text[:at] + text[at:].replace("3 all-reduce", "2 all-reduce", 1)) == text


def read(name, kind=Result):
    return results.from_json(kind, (results.ROOT / "results" / name).read_text(encoding="utf-8"))


@pytest.fixture
def result():
    """That of bench.py, without any times but those of ddp, of ddp again and of stage 1: two rounds each."""
    result = read("bench.json")
    result.rows = [row for row in result.rows if row.name != "ddp again"]
    for row in result.rows:
        row.rounds_ms, row.vs_reference = [], None
    ddp, stage1 = result.find("ddp"), result.find("stage 1 naive broadcast")
    ddp.rounds_ms, stage1.rounds_ms = [100, 200], [105, 210]
    again = dataclasses.replace(ddp, base="ddp again", kind="noise", rounds_ms=[104, 190])
    result.rows.append(again)
    for row in (ddp, stage1, again):
        row.vs_reference = row.over(ddp)
    result.conditions.noise = [1.04, 0.95]
    return result


def cells(out, name):
    return next(line for line in out.splitlines() if line.startswith(name)).split()


def test_what_lies_within_the_noise_is_marked(result, capsys):
    """5 % from ddp: as far as ddp is from itself in the second round. And 6 % is further than that."""
    tables.show(result)
    out = capsys.readouterr().out
    assert "1.05~" in cells(out, "stage 1 naive broadcast") and "1.00" in cells(out, "ddp  ")
    assert "took 0.95 to 1.04 times as long, 5% off at most" in " ".join(out.split())
    assert out.count("ddp again") == 1  # beside the times, and not beside the memory
    result.find("stage 1 naive broadcast").vs_reference = 1.06
    tables.show(result)
    assert "1.06" in cells(capsys.readouterr().out, "stage 1 naive broadcast")


def test_exposed_communication_is_that_of_the_rank_with_more_of_it(result, capsys):
    result.find("ddp").timeline = [RecordedStep(0.012), RecordedStep(0.034)]
    tables.show(result)
    assert "34" in cells(capsys.readouterr().out, "ddp  ")


def test_the_break_even_lies_where_an_exchange_each_costs_more_than_the_noise():
    """One micro-batch, both ways the same: 4 % apart. So 1.03 is noise, and what is dear must stay so."""
    def accumulation(*each):
        return [AccumulatedRow(k, [100, 100, 100], times)
                for k, times in zip((1, 2, 4), ([96, 100, 101], *each))]

    def found(*each):
        return " ".join(sheet_text(accumulation_sheet(accumulation(*each))).split())
    assert "Break-even: from 2 micro-batches a step on, an exchange" in found([106, 105, 103], [110, 109, 99])
    assert "Break-even: from 4 micro-batches a step on, an exchange" in found([103, 103, 120], [110, 109, 99])
    text = found([106, 105, 105], [103, 103, 103])
    assert "Break-even: no number up to 4 from which on an exchange" in text and "up to 4% apart" in text
    assert "1.00~" in text and "1.03~" in text and "1.05~" not in text
    assert "0.50 " in found([50, 50, 50], [97, 97, 97]) and "0.97~" in found([50, 50, 50], [97, 97, 97])


def test_communications_share_of_a_step_is_said():
    """Computing takes 100 ms a micro-batch; what is above is communication's."""
    def row(k, ddp, stage3, stage4):
        return AccumulatedRow(k, stage4, stage4, [100, 100], ddp, stage3)
    measured = Accumulation(None, [row(1, [400, 400], [500, 500], [125, 125]),
                                   row(2, [160, 160], [250, 250], [110, 110])], ddp_mb=2)
    assert share_sheet(measured).rows == [["1", "100", "75%", "80%", "20%"], ["2", "100", "38%", "60%", "9%"]]
    assert "the row ddp, 2 MB buckets" in share_sheet(measured).notes[0]
    said = pages.share_sentence(Result(of_9gbit(), [], accumulation=measured))
    assert said == ("without accumulation communication takes, of a step, of DDP 75%, below half from 2 "
                    "micro-batches on; of stage 3 80%, never below half; of stage 4 20%, less than half.")
    assert "not measured" in pages.share_sentence(Result(of_9gbit(), []))


def of_9gbit():
    return dataclasses.replace(read("network.json").conditions, machine="another", rate="9gbit", bits_per_second=9e9)


def curved(**ratios):
    """A result at 9 Gbit/s whose rows take so many times what computing alone does, 100 ms."""
    rows = [Row("compute only", rounds_ms=[100.0, 100.0], wire_bytes_theory=0)]
    rows += [Row(base.replace("_", " "), rounds_ms=[100.0 * one, 100.0 * one], wire_bytes_theory=225_000_000)
             for base, one in ratios.items()]  # 200 ms of the line
    return Result(of_9gbit(), rows)


def test_the_curve_has_the_figures_of_its_rows():
    """And dashes for those that it lacks; a picture has a point for each, and a line where make plan has none."""
    one = curved(ddp=4.0, stage_4_overlap=2.5, fsdp2=3.0)
    one.rows.append(Row("ddp", 2, rounds_ms=[312.5, 312.5]))
    cells = {row[0]: row[1] for row in pictures.sheet([one]).rows}
    assert cells["DDP, default buckets"] == "4.00" and cells["FSDP2"] == "3.00" and cells["rung 0, no overlap"] == NONE
    assert cells["DDP, tuned buckets"] == "3.12" and cells["DDP's best buckets"] == "2 MB" and cells["floor"] == "2.00"
    assert cells["stage 4 over tuned DDP"] == "0.80" and cells["stage 4 over the floor"] == "1.25"
    assert "0.80 at 9 Gbit/s" in pictures.sentences([one])[0] and "At none" in pictures.sentences([one])[0]
    slower = curved(stage_4_overlap=2.5)
    slower.rows.append(Row("ddp", 2, rounds_ms=[200.0, 200.0]))
    assert "From 9 Gbit/s on" in pictures.sentences([slower])[0]


def test_the_curve_s_picture_has_what_was_measured_and_what_was_modelled():
    svg = pages.PICTURES["curve.svg"]()
    n_points = sum(pictures.over_computing(result, base) is not None for result in results.at_all_rates()
                   for _, base, *_ in pictures.CURVES if base != "floor")
    assert svg.count("<circle") == n_points and svg.count("<polyline") == len(pictures.CURVES)
    assert "prefers-color-scheme:dark" in svg
    lines = {line.base: dict(line.points) for line in results.load_plan("plan.json").check.curve}
    slowest, fastest = min(lines["floor"]), max(lines["floor"])
    assert lines["floor"][slowest] > 1 and all(len(points) > 9 for points in lines.values())
    for base in ("ddp", pictures.TUNED, "stage 4 overlap"):
        assert lines[base][slowest] > lines[base][fastest] >= 1 and lines[base][slowest] >= lines["floor"][slowest]


def test_the_ladder_has_the_figures_of_one_run_and_dashes_for_what_failed(monkeypatch):
    """On the slowest line with all rows: what DDP took is 1.00."""
    def figures():
        lines = "\n".join(pages.MARKDOWN["ladder"]()).splitlines()
        return {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines) if len(cells) == 7}
    slowest = results.by_rate()[0]
    ddp = catalogue.tuned(slowest, "ddp") or slowest.find("ddp")
    found = figures()
    assert len(found) == 7 and found["DDP, replicated AdamW"][1] == "16.0 · 16.0 · 16.0"
    assert found["DDP, replicated AdamW"][3:] == ["2", "–", "1.00"]
    assert found["1 naive broadcast"][1] == "12.0 · 9.0 · 8.1"
    state = {row.name: row.bytes_per_param for row in results.load_bench().model_state}
    assert found["4 overlap"][1] == " · ".join(f"{state['stage 4 float32/float32'][d]:.1f}" for d in (2, 8, 64))
    for rung in tables.LADDER:
        row = ddp if rung.row == "ddp" else slowest.find(rung.row)
        assert found[rung.title][5] == f"{row.over(ddp):.2f}"
        assert found[rung.title][2] == f"{max(row.peak_bytes.values()) / 1e6:.0f}"
        assert row.wire_bytes_theory == pytest.approx(rung.travels / 2 * 4 * slowest.conditions.parameters, rel=1e-4)
        assert found[rung.title][3] == str(rung.travels)
    slowest.rows[slowest.rows.index(slowest.find("stage 3 grad buffer"))] = Row("stage 3 grad buffer")
    monkeypatch.setattr(results, "by_rate", lambda: [slowest])
    assert figures()["3 grad buffer"][2:4] == [NONE, "2"] and figures()["3 grad buffer"][5] == NONE


@pytest.mark.parametrize("rate, words", [("300mbit", "300 Mbit/s"), ("1gbit", "1 Gbit/s"), ("2.5gbit", "2.5 Gbit/s")])
def test_a_rate_in_words(rate, words):
    assert rate_words(rate) == words


def swept(result):
    """`result` as it would be after a sweep: ddp with 2 MB buckets takes 0.8 of the time, the other sizes twice."""
    def row(choice, share):
        base = result.find(choice.base)
        return dataclasses.replace(base, bucket_mb=choice.bucket_mb, kind="peer",
                                   rounds_ms=[share * one for one in base.rounds_ms])
    choices = [choice for choice in catalogue.choices() if choice.base in ("ddp", catalogue.OVERLAP)]
    share = {Choice("ddp"): 1, Choice("ddp", 2): 0.8}
    sweep = Sweep(result.conditions, [row(choice, share.get(choice, 2)) for choice in choices])
    at = result.rows.index(result.find("ddp")) + 1
    rows = [*result.rows[:at], row(Choice("ddp", 2), 0.8), *result.rows[at:]]
    return dataclasses.replace(result, sweep=sweep, rows=rows)


def without_sweep(result):
    """As it was before a sweep."""
    return dataclasses.replace(result, sweep=None, rows=[row for row in result.rows if row.bucket_mb is None])


def test_whoever_is_ahead_is_so_of_the_tuned_ddp(monkeypatch):
    """Of one that takes 0.8 of what the default takes, stage 4's lead is that much smaller, in each text."""
    plain = without_sweep(results.by_rate()[0])
    stage4, ddp = plain.find("stage 4 overlap"), plain.find("ddp")
    of_default, of_tuned = f"{stage4.over(ddp):.2f}", f"{stage4.over(ddp) / 0.8:.2f}"
    for result in (plain, swept(plain)):
        monkeypatch.setattr(results, "by_rate", lambda *_: [result])
        is_tuned = result.sweep is not None
        rungs, lead = "\n".join(tables.ladder_block()), pages.lead(result)
        ahead = pictures.sentences([result])[0] if is_tuned else ""
        expected = of_tuned if is_tuned else of_default
        assert next(line for line in rungs.splitlines() if line.startswith("4 overlap")).endswith(f"| {expected}")
        words = "DDP with 2 MB buckets, the best size tried" if is_tuned else "DDP with its default buckets"
        assert f"stage 4 takes {expected} of the time of {words}" in lead and words in " ".join(rungs.split())
        assert ("not measured" in lead) != is_tuned and (f"{of_tuned} at" in ahead) == is_tuned
        cells = {row[0]: row[1] for row in pictures.sheet([result]).rows}
        assert cells["stage 4 over tuned DDP"] == (expected if is_tuned else NONE)
    assert f"{of_default} of DDP with its default ones. Of these the tuned ones take 0.80" in lead


def test_where_the_default_is_the_best_size_it_is_the_tuned_one():
    plain = without_sweep(latest()[0])
    best = swept(plain)
    for row in best.sweep.rows:
        if row.choice == ("ddp", 2):
            row.rounds_ms = [10 * one for one in row.rounds_ms]
    assert catalogue.best(best.sweep.rows) == [] and catalogue.tuned(plain, "ddp") is None
    best.rows = plain.rows
    assert catalogue.tuned(best, "ddp") is plain.find("ddp")


def test_a_sweep_is_a_table_and_a_picture_with_round_ticks(monkeypatch):
    result = swept(without_sweep(latest()[0]))
    sheet = buckets_sheet(result.sweep)
    text = sheet_text(sheet)
    assert [row[0] for row in sheet.rows] == ["one-parameter", "0.25 MB", "1 MB", "2 MB", "4 MB", "8 MB", "25 MB",
                                              "100 MB", "default"]
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    assert sheet.rows[3][1] == f"{result.find('ddp', 2).median_ms:.0f}"
    svg = pictures.sweep_picture([result])
    assert svg.count("<polyline") == 2 and pictures.sweep_picture([without_sweep(result)]) == ""
    ticks = [int(tick) for tick in re.findall(r'text-anchor="end">(\d+)</text>', svg)]
    assert ticks == list(range(0, max(ticks) + 1, ticks[1])) and str(ticks[1]).strip("0") in ("1", "2", "5")
    monkeypatch.setattr(results, "by_rate", lambda *_: [result])
    assert "buckets.svg" in pages._buckets()[-1]


def test_the_rows_of_a_tuned_size_stand_behind_the_default():
    tuned = [Choice("ddp", 2), Choice("ddp + stage 1", 4)]
    assert catalogue.beside([Choice("ddp"), Choice("fsdp2")], tuned) == [
        Choice("ddp"), tuned[0], Choice("fsdp2"), tuned[1]]
    assert all(catalogue.find(*choice).name == choice.base for choice in catalogue.choices())
    choices = catalogue.choices("stage 4")
    assert choices[0] == ("ddp", None) and len(choices) == 1 + len(catalogue.SIZES)
    assert [Choice("ddp", size).name for size in (None, 2.0, 0.25, ONE_PARAMETER)] == [
        "ddp", "ddp, 2 MB buckets", "ddp, 0.25 MB buckets", "ddp, one-parameter buckets"]


def network_with(**rows):
    """A result of make network in which these rows have times, messages and nothing else."""
    return Result(of_9gbit(), [Row(base.replace("_", " "), rounds_ms=[ms, ms], **more)
                               for base, (ms, more) in rows.items()])


def test_what_each_half_of_the_overlap_buys_and_what_owners_send_is_said():
    sends = {"collectives": {"send": 4}, "message_bytes": {"send": 8000}}
    reduces = {"collectives": {"reduce": 10}, "message_bytes": {"reduce": 5000}}
    result = network_with(stage_4_neither=(200, {}), stage_4_only_gradients=(160, {}), owner_reduce=(300, reduces),
                          stage_4_only_parameters=(150, {}), stage_4_overlap=(100, sends))
    assert pages.apart(result) == ("of the time of stage 4 without overlap, gradients alone 0.80, "
                                       "parameters alone 0.75, both 0.50.")
    assert pages.owner(result) == (
        "owner reduce 10 messages of 0 kB on average, and 3.00 of stage 4's time; stage 4 overlap 4 messages of "
        "2 kB on average, and 1.00 of stage 4's time.")
    left = network_with(stage_4_overlap=(100, sends))
    assert "not measured" in pages.apart(left) and "not measured" in pages.owner(left)


def test_the_table_of_a_line_is_no_wider_than_100_columns():
    for result in latest():
        text = sheet_text(line_sheet(swept(without_sweep(result))))
        assert max(map(len, text.splitlines())) <= 100 and "…" not in text


def latest():
    return read("network.json").at_all_rates()


def test_how_long_an_evening_is():
    """200 words and 5 code lines a minute; the sum is that of the lines above it."""
    *lines, total = "\n".join(pages.MARKDOWN["reading"]()).splitlines()
    minutes = [int(re.search(r"(\d+) minutes", line)[1]) for line in lines]
    assert len(minutes) == 5 and float(re.search(r"[\d.]+", total)[0]) == pytest.approx(sum(minutes) / 60, abs=0.1)
    assert sum(minutes) <= 180, "an evening has three hours"


def test_a_table_of_times_is_no_wider_than_100_columns(result):
    for sheet in tables.sheets(result):
        assert max(map(len, sheet_text(sheet).splitlines())) <= 100 and "…" not in sheet_text(sheet)


def test_on_cuda_what_the_allocator_took_has_a_column(result, capsys):
    result.conditions.device = "cuda"
    for row in result.rows:
        row.memory_bytes["reserved"] = 314.2e6
    tables.show(result)
    out = capsys.readouterr().out
    memory = out[out.index("Memory of a rank"):]
    assert "reserved" in memory and "…" not in out
    assert cells(memory, "stage 1 naive broadcast").count("314.2") == 1
    assert {len(line) for line in memory.splitlines() if line.startswith("─")} <= set(range(111))


def with_kinds(result):
    """`result` with the kinds of memory, which older ones lack."""
    for number, row in enumerate(result.rows, 1):
        row.peak_bytes = dict.fromkeys(("build", "forward", "backward", "step"), 1e6 * number)
        row.held_bytes = dict(zip(("parameters", "gradients", "state", "buffers"), (1.5e10, 2e7, 3e7, 4e7)))
        row.activation_bytes = 5.55e7
    return result


def test_kinds_of_memory_are_a_sheet_of_their_own_where_they_were_counted(result):
    """A row that failed has dashes, and so has one that was counted before there were kinds."""
    for row in result.rows:
        row.peak_bytes, row.held_bytes, row.activation_bytes = {}, {}, None
    assert len(memory_sheets(result)) == 1
    ddp = with_kinds(result).find("ddp")
    ddp.peak_bytes, ddp.held_bytes, ddp.activation_bytes = {}, {}, None
    _, kinds = memory_sheets(result)
    found = {row[0]: row[1:] for row in kinds.rows}
    assert found["ddp"] == [NONE] * 9 and "ddp again" not in found
    number = 1 + [row.name for row in result.rows].index("stage 4 overlap")
    assert found["stage 4 overlap"] == [f"{number}.0"] * 4 + ["15000", "20.0", "30.0", "40.0", "55.5"]
    text = sheet_text(kinds)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text


def test_the_gpu_s_block_has_the_memory_too(monkeypatch):
    bench = with_kinds(results.load("bench_cuda.json"))
    monkeypatch.setattr(results, "load_of", lambda *_: bench)
    sheets = pages.BLOCKS["cuda"]()
    assert [text.splitlines()[0].split(",")[0] for text in sheets[1:5]] == [
        "Host time of a step in ms", "Time and traffic of a step", "Memory of a rank", "Peak within each phase"]
    assert "commit" in sheets[0] and "commit" in sheets[5]  # of which code these figures are
    assert "reserved" in sheets[3] and "…" not in "".join(sheets)


def test_an_unknown_block_is_an_error():
    with pytest.raises(KeyError):
        pages.rewritten("<!-- report: nothing -->\n<!-- end -->\n")


@pytest.mark.parametrize("part", ["model_state", "gathered", "host", "rows"])
def test_a_part_of_the_bench_is_said_to_be_one(part, tmp_path, monkeypatch):
    """What --quick and --rows leave out."""
    whole = read("bench.json")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    left = dataclasses.replace(whole, **{part: whole.rows[:2] if part == "rows" else []})
    (tmp_path / "results" / "bench.json").write_text(results.to_json(left))
    with pytest.raises(SystemExit, match="results/bench.json is a part of the bench"):
        pages.rewritten("<!-- report: gathered -->\n<!-- end -->")


def test_a_row_that_failed_has_no_line_and_says_why():
    result = read("network.json")
    result.rows[result.rows.index(result.find("fsdp2"))] = Row("fsdp2", kind="peer", error="rank 1: it broke")
    text = sheet_text(line_sheet(result))
    assert cells(text, "fsdp2") == ["fsdp2", *[NONE] * 6] and "fsdp2: rank 1: it broke" in text


def copied(tmp_path):
    return shutil.copytree(results.ROOT, tmp_path / "copy", ignore=IGNORED)


@pytest.mark.waits
def test_a_locale_without_unicode_changes_nothing(tmp_path):
    copy = copied(tmp_path)
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    first = run_module("harness.pages", cwd=copy)  # after it the tables are those of results/, in any case
    assert first.code == 0, first.stderr
    run = subprocess.run([sys.executable, "-m", "harness.pages"], cwd=copy, env=ascii_only, capture_output=True,
                         text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert all(line.endswith("unchanged") for line in run.stdout.splitlines())


@pytest.mark.waits
def test_a_terminal_that_knows_ascii_only_gets_the_tables_too():
    show = "from harness import results, tables; tables.show(results.load('bench.json'))"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", show], cwd=results.ROOT, env=ascii_only, capture_output=True,
                         text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "stage 4 overlap" in run.stdout and "largest" in run.stdout and "|?|" in run.stdout


WITHOUT_NUMBERS = json.dumps({"schema": results.SCHEMA, "kills": "many"})
OF_ANOTHER_SCHEMA = json.dumps({"schema": 0, "conditions": {}, "rows": []})


@pytest.mark.waits
@pytest.mark.parametrize("name, content", [("network.json", ""), ("faults.json", "{}"), ("bench.json", "[1]"),
                                           ("cuda.json", ""), ("bench_cuda.json", "{}"), ("cuda.json", None),
                                           ("faults.json", WITHOUT_NUMBERS), ("bench.json", OF_ANOTHER_SCHEMA)])
def test_damaged_results_are_one_line_and_nothing_is_written(name, content, tmp_path, monkeypatch):
    copy = copied(tmp_path)
    monkeypatch.setattr(results, "ROOT", copy)
    monkeypatch.setattr(sys, "argv", ["report"])
    page = copy / "results" / "README.md"
    text = page.read_text(encoding="utf-8").replace("3 all-reduce", "2 all-reduce")
    page.write_text(text, encoding="utf-8")
    (copy / "results" / name).unlink()
    if content is None:
        (copy / "results" / name).mkdir()
    else:
        (copy / "results" / name).write_text(content)
    with pytest.raises(SystemExit, match="^report: .*$"):
        pages.main()
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("device, name", [("cpu", "bench.json"), ("cuda", "bench_cuda.json")])
def test_a_result_of_another_device_is_not_shown(device, name, tmp_path, monkeypatch):
    copy = copied(tmp_path)
    monkeypatch.setattr(results, "ROOT", copy)
    names = {"cpu": "bench_cuda.json", "cuda": "bench.json"}
    shutil.copy(copy / "results" / names[device], copy / "results" / name)
    with pytest.raises(SystemExit, match=f"^report: results/{name} must be measured with device {device}, .*$"):
        pages.BLOCKS["bench" if device == "cpu" else "cuda"]()


def test_what_is_missing_is_named_with_its_command(tmp_path, monkeypatch):
    copy = copied(tmp_path)
    monkeypatch.setattr(results, "ROOT", copy)
    (copy / "results" / "bench_cuda.json").unlink()
    with pytest.raises(SystemExit, match='run make bench ARGS="--json results/bench_cuda.json" first$'):
        pages.BLOCKS["cuda"]()


def test_a_bench_with_a_row_that_failed_is_a_part_of_it(tmp_path, monkeypatch):
    whole = read("bench.json")
    whole.find("stage 1 naive broadcast").fail("rank 0: it broke")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bench.json").write_text(results.to_json(whole))
    with pytest.raises(SystemExit, match="results/bench.json is a part of the bench"):
        pages.rewritten("<!-- report: bench -->\n<!-- end -->")


def test_accumulation_that_was_not_measured_is_said_to_be_so(monkeypatch):
    def without(name, *more):
        found = load(name, *more)
        for result in (found, *found.other_rates):
            result.accumulation = None
        return found
    load = results.load
    monkeypatch.setattr(results, "load", without)
    assert "Not measured: make network" in pages.rewritten("<!-- report: accumulation -->\n<!-- end -->")


def test_a_file_of_another_schema_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    for text, says in (('{"schema": 0}', "its schema is 0, this program's is 1"), ("{}", "it has no schema"),
                       ('{"schema": 1, "rows": []}', "Result.conditions: Field required"),
                       ('{"schema": 1, "conditions": {}, "rows": 3}', "Result.conditions.machine: Field required")):
        (tmp_path / "results" / "bench.json").write_text(text)
        with pytest.raises(SystemExit, match=f"^report: .*bench.json can't be shown: run make bench again .*{says}"):
            results.load("bench.json")


@pytest.mark.parametrize("name, kind", [("bench.json", Result), ("network.json", Result), ("plan.json", PlanResult),
                                        ("cuda.json", GpuResult), ("faults.json", FaultResult),
                                        ("faults_mutations.json", MutationResult)])
def test_what_is_read_is_written_as_it_was(name, kind):
    text = (results.ROOT / "results" / name).read_text(encoding="utf-8")
    assert results.to_json(results.from_json(kind, text)) == text


def test_a_field_of_another_type_or_name_is_named():
    whole = json.loads((results.ROOT / "results" / "bench.json").read_text(encoding="utf-8"))
    for change, says in (({"wire_bytes": "many"}, "Result.rows.0.wire_bytes: Input should be a valid integer"),
                         ({"step_ms": 3.0}, "Result.rows.0.step_ms: Unexpected keyword argument"),
                         ({"timeline": [{"seconds": 1.0}]}, "Result.rows.0.timeline.0.exposed_seconds: Field required"),
                         ({"collectives": {"send": None}}, "Result.rows.0.collectives.send: Input should be")):
        text = json.dumps({**whole, "rows": [{**whole["rows"][0], **change}]})
        with pytest.raises(results.UnreadableResult, match=says):
            results.from_json(Result, text)


# ------------------------------------------------------------------------------------------------ yours, and publishing


@pytest.fixture
def copy_with_yours(tmp_path, monkeypatch):
    """-> a copy of the project, in whose measured/ lie a bench and a network run: 1 gbit again, and 9 gbit."""
    copy = copied(tmp_path)
    (copy / "measured").mkdir()
    bench, (network, *_) = read("bench.json"), read("network.json").at_all_rates()
    bench.find("stage 4 overlap").vs_reference = 0.42
    bench.conditions.date = network.conditions.date = "3000-01-01"
    network.conditions.rate, network.conditions.bits_per_second, network.sweep = "9gbit", 9e9, None
    for name, result in (("bench.json", bench), ("network.json", network)):
        (copy / "measured" / name).write_text(results.to_json(result), encoding="utf-8")
    monkeypatch.setattr(results, "ROOT", copy)
    return copy


def test_yours_stand_beside_the_published_ones(copy_with_yours):
    bench, network = map(sheet_text, pages.sheets())
    theirs = read("bench.json").find("stage 4 overlap")
    assert cells(bench, "stage 4 overlap ")[5:7] == [f"{theirs.vs_reference:.2f}", "0.42"]
    assert "3000-01-01" in bench and "Yours beside the published ones: network.json, 9gbit" in network
    assert "Published: none at this rate" in network and cells(network, "ddp ")[1] == NONE
    assert max(map(len, [*bench.splitlines(), *network.splitlines()])) <= pages.COLUMNS


@pytest.mark.waits
def test_nothing_is_published_unless_it_is_said(copy_with_yours, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report"])
    before = {path: path.read_bytes() for path in (copy_with_yours / "results").iterdir()}
    pages.main()
    assert "Yours beside the published ones: bench.json" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in (copy_with_yours / "results").iterdir()}
    assert len(list((copy_with_yours / "measured").iterdir())) == 2


def test_what_is_published_is_in_the_place_of_ours_and_other_rates_stay(copy_with_yours):
    rates_before = {result.conditions.rate for result in read("network.json").at_all_rates()}
    assert pages.publish() == ["measured/bench.json is results/bench.json now",
                               "measured/network.json is results/network.json now"]
    assert read("bench.json").find("stage 4 overlap").vs_reference == 0.42
    network = read("network.json")
    assert {result.conditions.rate for result in network.at_all_rates()} == rates_before | {"9gbit"}
    assert not list((copy_with_yours / "measured").iterdir())
    assert pages.sheets() == [] and pages.publish() == ["measured/ holds nothing to publish"]


def test_rows_of_variants_are_published_in_files_of_their_own(copy_with_yours):
    """As Make calls them: measured/bench_variants.json and network_variants.json, with other rates behind."""
    measured, before = copy_with_yours / "measured", {name: read(name) for name in ("bench.json", "network.json")}
    (copy_with_yours / "results" / "network_variants.json").unlink(missing_ok=True)
    for name in before:
        (measured / name).rename(measured / name.replace(".json", "_variants.json"))
    assert [sheet.title.rpartition(": ")[2] for sheet in pages.sheets()] == [
        "bench_variants.json", "network_variants.json, 9gbit"]
    for rates_there in ({"9gbit"}, {"9gbit", "8gbit"}):
        pages.publish()
        published_now = read("network_variants.json")
        assert {result.conditions.rate for result in published_now.at_all_rates()} == rates_there
        assert not any(step.seconds for row in published_now.rows for step in row.timeline)
        published_now.conditions.rate = "8gbit"
        (measured / "network_variants.json").write_text(results.to_json(dataclasses.replace(
            published_now, other_rates=[])))
    assert before == {name: read(name) for name in before} and read("bench_variants.json").rows


def test_make_gives_rows_of_variants_a_file_of_their_own():
    for target, arguments, file in (("bench", "--rows variants", "bench_variants"), ("bench", "--rows stage", "bench"),
                                    ("network", "--rows variants", "network_variants")):
        said = subprocess.run(["make", "--dry-run", target, f"ARGS={arguments}", f"PYTHON={sys.executable}"], cwd=HERE,
                              capture_output=True, text=True, check=True).stdout
        assert f"--json measured/{file}.json {arguments}" in said


@pytest.mark.parametrize("device, target", [("cpu", "bench.json"), ("cuda", "bench_cuda.json")])
def test_a_bench_is_published_beside_those_of_its_device(device, target, copy_with_yours):
    mine = results.from_json(Result, (copy_with_yours / "measured" / "bench.json").read_text())
    mine.conditions.device = device
    (copy_with_yours / "measured" / "bench.json").write_text(results.to_json(mine))
    assert pages.publish()[0] == f"measured/bench.json is results/{target} now"


def test_a_part_of_a_bench_is_not_published(copy_with_yours):
    path = copy_with_yours / "measured" / "bench.json"
    path.write_text(results.to_json(dataclasses.replace(read("bench.json"), host=[])))
    before = (copy_with_yours / "results" / "network.json").read_bytes()
    with pytest.raises(SystemExit, match="^report: measured/bench.json is a part of the bench"):
        pages.publish()
    assert path.exists() and (copy_with_yours / "results" / "network.json").read_bytes() == before


def test_a_rate_that_is_measured_again_keeps_the_sweep_of_before():
    first, *others = read("network.json").at_all_rates()
    again = dataclasses.replace(read("network.json"), other_rates=[], sweep=None, accumulation=None)
    found = results.merged(again, [first, *others])
    assert found.sweep == first.sweep and found.accumulation == first.accumulation
    assert [one.conditions.rate for one in found.at_all_rates()] == [
        one.conditions.rate for one in (first, *others)]


@pytest.mark.waits
def test_a_run_leaves_the_checkout_clean(tmp_path):
    """As in a fresh clone: `make bench`, then what `make report` calls, then `git status` has nothing to say."""
    copy = shutil.copytree(HERE, tmp_path / "clone", ignore=IGNORED_IN_A_CLONE)

    def git(*command):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.example", *command], cwd=copy,
                              capture_output=True, text=True, check=True, timeout=300).stdout
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "all")
    small = "--quick --model nano --sequence-length 16 --batch-size 2 --rows compute --ranks 1"
    run = subprocess.run(["make", "bench", f"ARGS={small}", f"PYTHON={sys.executable}"], cwd=copy, capture_output=True,
                         text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    called = subprocess.run(["make", "--dry-run", "report", f"PYTHON={sys.executable}"], cwd=copy, capture_output=True,
                            text=True, check=True).stdout
    printed = ""
    for program in called.splitlines():  # in forked processes: each would import torch anew
        module, *arguments = program.removeprefix(f"{sys.executable} -m ").split()
        ended = run_module(module, *arguments, cwd=copy, limit_s=240)
        assert ended.code == 0, ended.stderr
        printed += ended.stdout
    assert (copy / "measured" / "bench.json").exists() and "Yours beside the published ones" in printed
    assert "watch.html" in printed and called.count("-m variants --page") == 1
    assert git("status", "--porcelain") == ""
