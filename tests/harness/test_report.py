"""The tables and pictures in README.md and the chapters are those of results/*.json."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from harness.measure import every_row
from harness.report import blocks, ladder, pages, published, sentences, sweep_picture, terminal
from harness.report.accumulation_tables import accumulation_sheet, share_sheet
from harness.report.bucket_tables import buckets_sheet
from harness.report.cells import label_of
from harness.report.line_tables import line_sheet, machines_sheet
from harness.report.row_tables import memory_sheets
from harness.report.sheet import NONE, sheet_text
from harness.rows import bucket_sizes, catalogue

HERE = published.ROOT
IGNORED = shutil.ignore_patterns(".venv", ".git", "__pycache__", "tests")


@pytest.fixture(scope="session")
def committed(tmp_path_factory):
    """A copy of the project with results/ as committed: `make bench` has written a reader's own into this one."""
    root = shutil.copytree(HERE, tmp_path_factory.mktemp("committed") / "copy", ignore=IGNORED)
    for path in (root / "results").glob("*.json"):
        git = subprocess.run(["git", "show", f"HEAD:./results/{path.name}"], cwd=HERE, capture_output=True, timeout=60)
        if git.returncode == 0:  # else this is no clone
            path.write_bytes(git.stdout)
    return root


@pytest.fixture(autouse=True)
def of_what_is_committed(committed, monkeypatch):
    monkeypatch.setattr(published, "ROOT", committed)


@pytest.mark.parametrize("path", pages.files(), ids=lambda path: path.parent.name + "/" + path.name)
def test_every_block_agrees_with_its_json(path, monkeypatch):
    text = path.read_text()
    if pages.rewritten(text) != text:
        monkeypatch.setattr(published, "ROOT", HERE)  # with what is measured anew, and not committed yet
        assert pages.rewritten(text) == text, "run make report"


@pytest.mark.parametrize("path", blocks.PICTURES, ids=lambda path: path.name)
def test_every_picture_agrees_with_its_json(path, monkeypatch):
    text = path.read_text() if path.exists() else ""  # of what was not measured there is none
    if blocks.PICTURES[path]() != text:
        monkeypatch.setattr(published, "ROOT", HERE)
        assert blocks.PICTURES[path]() == text, "run make report"


def test_every_block_is_in_the_readme_or_among_the_results_once():
    names = [name for path in pages.files() for name in re.findall(r"<!-- report: (\w+) -->", path.read_text())]
    assert sorted(names) == sorted([*blocks.BLOCKS, *blocks.MARKDOWN])


@pytest.mark.parametrize("path", [path for path in pages.files() if "stage" not in path.parent.name],
                         ids=lambda path: path.parent.name + "/" + path.name)
def test_no_figure_is_typed_into_the_prose(path):
    """What was measured stands between the marks, where `make report` changes it. Chapters predict: test_chapters."""
    versions = r"Python ≥ [\d.]+|torch [\d.]+ to [\d.]+"
    text = re.sub(rf"<!-- report: .*?<!-- end -->|```.*?```|`[^`]*`|{versions}", "", path.read_text(), flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    assert re.findall(r"\b\d+ ?(?:ms|MB|GB|%|s\b|seconds|minutes|hours)|\b\d+\.\d\d+\b", prose) == [], path.name


def test_a_figure_that_somebody_typed_is_found():
    text = pages.rewritten((published.ROOT / "results" / "README.md").read_text())
    at = text.index("ddp + stage 1")
    assert pages.rewritten(text[:at] + text[at:].replace("3 all-reduce", "2 all-reduce", 1)) == text


@pytest.fixture
def result():
    """That of bench.py, without any times but those of ddp, of ddp again and of stage 1: two rounds each."""
    result = json.loads((published.ROOT / "results" / "bench.json").read_text())
    times = {"ddp": [100, 200], "ddp again": [104, 190], "stage 1 naive broadcast": [105, 210]}
    rows = {row["name"]: row for row in result["rows"]}
    for row in rows.values():
        row.update(step_ms=None, vs_reference=None)
    rows["ddp again"] = {**rows["ddp"], "name": "ddp again", "kind": "noise"}
    result["rows"] = list(rows.values())
    for name, found in times.items():
        every_row.add_times(rows[name], found, times["ddp"])
    result["conditions"]["noise"] = [1.04, 0.95]
    return result


def cells(out, name):
    return next(line for line in out.splitlines() if line.startswith(name)).split()


def test_what_lies_within_the_noise_is_marked(result, capsys):
    """5 % from ddp: as far as ddp is from itself in the second round. And 6 % is further than that."""
    terminal.show(result)
    out = capsys.readouterr().out
    assert "1.05~" in cells(out, "stage 1 naive broadcast") and "1.00" in cells(out, "ddp  ")
    assert "took 0.95 to 1.04 times as long, 5% off at most" in " ".join(out.split())
    assert out.count("ddp again") == 1  # beside the times, and not beside the memory
    find(result, "stage 1 naive broadcast")["vs_reference"] = 1.06
    terminal.show(result)
    assert "1.06" in cells(capsys.readouterr().out, "stage 1 naive broadcast")


def find(result, name):
    return next(row for row in result["rows"] if row["name"] == name)


def test_exposed_communication_is_that_of_the_rank_with_more_of_it(result, capsys):
    find(result, "ddp")["timeline"] = [{"exposed_seconds": 0.012}, {"exposed_seconds": 0.034}]
    terminal.show(result)
    assert "34" in cells(capsys.readouterr().out, "ddp  ")


def test_the_break_even_lies_where_an_exchange_each_costs_more_than_the_noise():
    """One micro-batch, both ways the same: 4 % apart. So 1.03 is noise, and what is dear must stay so."""
    def accumulation(*each):
        return [{"micro_batches": k, "no_sync_ms": [100, 100, 100], "each_ms": times}
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
        return {"micro_batches": k, "compute_ms": [100, 100], "ddp_ms": ddp, "stage3_ms": stage3, "no_sync_ms": stage4,
                "each_ms": stage4}
    measured = {"ddp": "ddp, 2 MB buckets", "rows": [row(1, [400, 400], [500, 500], [125, 125]),
                                                     row(2, [160, 160], [250, 250], [110, 110])]}
    assert share_sheet(measured).rows == [["1", "100", "75%", "80%", "20%"], ["2", "100", "38%", "60%", "9%"]]
    assert "the row ddp, 2 MB buckets" in share_sheet(measured).notes[0]
    said = sentences.share_sentence({"conditions": {"rate": "9gbit"}, "accumulation": measured})
    assert said == ("9gbit: without accumulation communication takes, of a step, of DDP 75%, below half from 2 "
                    "micro-batches on; of stage 3 80%, never below half; of stage 4 20%, less than half.")
    assert "not measured" in sentences.share_sentence({"conditions": {"rate": "9gbit"}})


def test_machines_have_the_figures_of_their_own_tables():
    """A row a machine and rate; what it hasn't measured has a dash."""
    one = json.loads((published.ROOT / "results" / "network.json").read_text())
    part = {**one, "conditions": {**one["conditions"], "machine": "another", "rate": "9gbit", "bits_per_second": 9e9},
            "rows": [row for row in one["rows"] if row["name"] in ("compute only", "ddp", "stage 4 overlap")]}
    first, second = machines_sheet([one, part]).rows
    cells = {row[0]: row for row in line_sheet(one).rows}
    tuned = bucket_sizes.tuned(one, "ddp")
    assert first == [one["conditions"]["rate"], one["conditions"]["machine"], cells["compute only"][1].split()[0],
                     cells["stage 4 overlap"][3], cells[label_of(tuned)][7] if tuned else NONE,
                     cells["ddp"][7], cells["ddp + torch ZeRO"][7], cells["fsdp2"][7], cells["stage 4 overlap"][5]]
    assert second[:2] == ["9gbit", "another"] and second[6:8] == [NONE] * 2
    assert NONE not in [*second[2:4], second[5], second[8]]
    assert float(second[3]) < float(first[3])  # of a faster line


def test_the_ladder_has_the_figures_of_one_run_and_dashes_for_what_failed(monkeypatch):
    """On the slowest line: what DDP took is 1.00, and what gloo sends twice has a mark."""
    def figures():
        lines = "\n".join(blocks.MARKDOWN["ladder"]()).splitlines()
        return {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines) if len(cells) == 6}
    slowest = min(latest(), key=lambda one: one["conditions"]["bits_per_second"])
    ddp = bucket_sizes.tuned(slowest, "ddp") or find(slowest, "ddp")
    found = figures()
    assert len(found) == 6 and found["DDP, replicated AdamW"][1:] == ["16", "2·4Ψ: 43.4", "–", "1.00"]
    for rung in ladder.LADDER:
        row = ddp if rung.row == "ddp" else find(slowest, rung.row)
        assert found[rung.title][4] == f"{bucket_sizes.ratio(row, ddp):.2f}"
        assert f"{row['wire_bytes'] / 1e6:.1f}" in found[rung.title][2]
        assert found[rung.title][2].endswith("\\*") == ("reduce_scatter" in row["collectives"])
    for name in ("wire_bytes", "bytes_per_param", "step_ms"):
        find(slowest, "stage 3 grad buffer")[name] = None
    monkeypatch.setattr(published, "by_rate", lambda: [slowest])
    assert figures()["3 grad buffer"][1:3] == ["8 + 8/d", "2·4Ψ"] and figures()["3 grad buffer"][4] == NONE


def swept(result):
    """`result` as it would be after a sweep: ddp with 2 MB buckets takes 0.8 of the time, the other sizes twice."""
    def row(name, share):
        base = find(result, bucket_sizes.base_of(name))
        times = [share * one for one in base["step_ms"]["rounds"]]
        step_ms = {"median": sorted(times)[len(times) // 2], "min": min(times), "max": max(times), "rounds": times}
        return {**base, "name": name, "kind": "peer", "step_ms": step_ms}
    names = [name for name in bucket_sizes.names() if bucket_sizes.base_of(name) in ("ddp", bucket_sizes.STAGE_4)]
    share = {"ddp": 1, "ddp, 2 MB buckets": 0.8}
    sweep = {"conditions": result["conditions"], "rows": [row(name, share.get(name, 2)) for name in names]}
    at_ddp = next(i for i, one in enumerate(result["rows"]) if one["name"] == "ddp")
    rows = [*result["rows"][: at_ddp + 1], row("ddp, 2 MB buckets", 0.8), *result["rows"][at_ddp + 1 :]]
    return {**result, "sweep": sweep, "rows": rows}


def without_sweep(result):
    """As it was before a sweep."""
    left = {key: value for key, value in result.items() if key != "sweep"}
    return {**left, "rows": [row for row in result["rows"] if ", " not in row["name"]]}


def test_whoever_is_ahead_is_so_of_the_tuned_ddp(monkeypatch):
    """Of one that takes 0.8 of what the default takes, stage 4's lead is that much smaller, in each text."""
    plain = without_sweep(min(latest(), key=lambda one: one["conditions"]["bits_per_second"]))
    stage4, ddp = find(plain, "stage 4 overlap"), find(plain, "ddp")
    of_default, of_tuned = f"{bucket_sizes.ratio(stage4, ddp):.2f}", f"{bucket_sizes.ratio(stage4, ddp) / 0.8:.2f}"
    for result in (plain, swept(plain)):
        monkeypatch.setattr(published, "by_rate", lambda *_: [result])
        is_tuned = "sweep" in result
        rungs, lead, ahead = "\n".join(ladder.ladder_block()), sentences.lead(result), sentences.ahead()[0]
        expected = of_tuned if is_tuned else of_default
        assert next(line for line in rungs.splitlines() if line.startswith("4 overlap")).endswith(f"| {expected}")
        words = "DDP with 2 MB buckets, the best size tried" if is_tuned else "DDP with its default buckets"
        assert f"stage 4 takes {expected} of the time of {words}" in lead and words in " ".join(rungs.split())
        assert ("not measured" in lead) != is_tuned and ("not measured" in ahead) != is_tuned
        assert f"{of_default} of default DDP" in ahead and (f"best size: {of_tuned}" in ahead) == is_tuned
        cells = machines_sheet([result]).rows[0]
        assert cells[4:6] == [expected if is_tuned else NONE, of_default]
    assert f"{of_default} of DDP with its default ones. Of these the tuned ones take 0.80" in lead


def test_where_the_default_is_the_best_size_it_is_the_tuned_one():
    plain = without_sweep(latest()[0])
    best = swept(plain)
    for row in best["sweep"]["rows"]:
        if row["name"] == "ddp, 2 MB buckets":
            row["step_ms"]["median"] *= 10
    assert bucket_sizes.best(best["sweep"]["rows"]) == [] and bucket_sizes.tuned(plain, "ddp") is None
    best["rows"] = plain["rows"]
    assert bucket_sizes.tuned(best, "ddp") is find(plain, "ddp")


def test_a_sweep_is_a_table_and_a_picture_with_round_ticks(monkeypatch):
    result = swept(without_sweep(latest()[0]))
    sheet = buckets_sheet(result["sweep"])
    text = sheet_text(sheet)
    assert [row[0] for row in sheet.rows] == ["one-parameter", "0.25 MB", "1 MB", "2 MB", "4 MB", "8 MB", "25 MB",
                                              "100 MB", "default"]
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    assert sheet.rows[3][1] == f"{bucket_sizes.median(find(result['sweep'], 'ddp, 2 MB buckets')):.0f}"
    svg = sweep_picture.picture([result])
    assert svg.count("<polyline") == 2 and sweep_picture.picture([without_sweep(result)]) == ""
    ticks = [int(tick) for tick in re.findall(r'text-anchor="end">(\d+)</text>', svg)]
    assert ticks == list(range(0, max(ticks) + 1, ticks[1])) and str(ticks[1]).strip("0") in ("1", "2", "5")
    monkeypatch.setattr(published, "by_rate", lambda *_: [result])
    assert "buckets.svg" in blocks._buckets()[-1]


def test_the_rows_of_a_tuned_size_stand_behind_the_default():
    assert bucket_sizes.beside(["ddp", "fsdp2"], ["ddp, 2 MB buckets", "ddp + stage 1, 4 MB buckets"]) == [
        "ddp", "ddp, 2 MB buckets", "fsdp2", "ddp + stage 1, 4 MB buckets"]
    assert all(catalogue.find(name).name == name for name in bucket_sizes.names())
    names = bucket_sizes.names("stage 4")
    assert names[0] == "ddp" and len(names) == 1 + len(bucket_sizes.SIZES)


def network_with(rows):
    """A result of make network in which these rows have times, messages and nothing else."""
    def row(name, ms, **more):
        return {"name": name, "step_ms": {"median": ms, "min": ms, "max": ms, "rounds": [ms, ms]}, **more}
    return {"conditions": {"rate": "9gbit", "bits_per_second": 9e9}, "rows": [row(*one[:2], **one[2]) for one in rows]}


def test_what_each_half_of_the_overlap_buys_and_what_owners_send_is_said():
    sends = {"collectives": {"send": 4}, "message_bytes": {"send": 8000}}
    reduces = {"collectives": {"reduce": 10}, "message_bytes": {"reduce": 5000}}
    result = network_with([("stage 4 neither", 200, {}), ("stage 4 only gradients", 160, {}),
                           ("owner reduce", 300, reduces), ("stage 4 only parameters", 150, {}),
                           ("stage 4 overlap", 100, sends)])
    assert sentences.apart(result) == ("9gbit: of the time of stage 4 without overlap, gradients alone 0.80, "
                                     "parameters alone 0.75, both 0.50.")
    assert sentences.owner(result) == ("9gbit: owner reduce 10 messages of 0 kB on average, and 3.00 of stage 4's "
                                     "time; stage 4 overlap 4 messages of 2 kB on average, and 1.00 of stage 4's time.")
    left = {**result, "rows": result["rows"][-1:]}
    assert "not measured" in sentences.apart(left) and "not measured" in sentences.owner(left)


def test_the_table_of_a_line_is_no_wider_than_100_columns():
    for result in latest():
        text = sheet_text(line_sheet(swept(without_sweep(result))))
        assert max(map(len, text.splitlines())) <= 100 and "…" not in text


def latest():
    found = json.loads((published.ROOT / "results" / "network.json").read_text())
    return [found, *found["other_rates"]]


def test_how_long_an_evening_is():
    """200 words and 5 code lines a minute; the sum is that of the lines above it."""
    *lines, total = "\n".join(blocks.MARKDOWN["reading"]()).splitlines()
    minutes = [int(re.search(r"(\d+) minutes", line)[1]) for line in lines]
    assert len(minutes) == 5 and float(re.search(r"[\d.]+", total)[0]) == pytest.approx(sum(minutes) / 60, abs=0.1)
    assert sum(minutes) <= 180, "an evening has three hours"


def test_a_table_of_times_is_no_wider_than_100_columns(result):
    for sheet in terminal.sheets(result):
        assert max(map(len, sheet_text(sheet).splitlines())) <= 100 and "…" not in sheet_text(sheet)


def test_on_cuda_what_the_allocator_took_has_a_column(result, capsys):
    result["conditions"]["device"] = "cuda"
    for row in result["rows"]:
        row["memory_bytes"]["reserved"] = 314.2e6
    terminal.show(result)
    out = capsys.readouterr().out
    memory = out[out.index("Memory of a rank"):]
    assert "reserved" in memory and "…" not in out
    assert cells(memory, "stage 1 naive broadcast").count("314.2") == 1
    assert {len(line) for line in memory.splitlines() if line.startswith("─")} <= set(range(111))


def with_kinds(result):
    """`result` with the kinds of memory, which older ones lack."""
    for number, row in enumerate(result["rows"], 1):
        row["peak_bytes"] = {phase: 1e6 * number for phase in ("build", "forward", "backward", "step")}
        row["held_bytes"] = dict(zip(("parameters", "gradients", "state", "buffers"), (1.5e10, 2e7, 3e7, 4e7)))
        row["activation_bytes"] = 5.55e7
    return result


def test_kinds_of_memory_are_a_sheet_of_their_own_where_they_were_counted(result):
    """A row that failed has dashes, and so has one that was counted before there were kinds."""
    for row in result["rows"]:
        for key in ("peak_bytes", "held_bytes", "activation_bytes"):
            row.pop(key, None)
    assert len(memory_sheets(result)) == 1
    ddp = find(with_kinds(result), "ddp")
    for key in ("peak_bytes", "held_bytes", "activation_bytes"):
        del ddp[key]
    _, kinds = memory_sheets(result)
    found = {row[0]: row[1:] for row in kinds.rows}
    assert found["ddp"] == [NONE] * 9 and "ddp again" not in found
    number = 1 + [row["name"] for row in result["rows"]].index("stage 4 overlap")
    assert found["stage 4 overlap"] == [f"{number}.0"] * 4 + ["15000", "20.0", "30.0", "40.0", "55.5"]
    text = sheet_text(kinds)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text


def test_the_gpu_s_block_has_the_memory_too(monkeypatch):
    bench = with_kinds(published.load("bench_cuda.json"))
    monkeypatch.setattr(published, "load_of", lambda *_: bench)
    sheets = blocks.BLOCKS["cuda"]()
    assert [text.splitlines()[0].split(",")[0] for text in sheets[1:4]] == [
        "Time and traffic of a step", "Memory of a rank", "Peak within each phase"]
    assert "commit" in sheets[0] and "commit" in sheets[4]  # of which code these figures are
    assert "reserved" in sheets[2] and "…" not in "".join(sheets)


def test_an_unknown_block_is_an_error():
    with pytest.raises(KeyError):
        pages.rewritten("<!-- report: nothing -->\n<!-- end -->\n")


@pytest.mark.parametrize("part", ["model_state", "gathered", "host", "rows"])
def test_a_part_of_the_bench_is_said_to_be_one(part, tmp_path, monkeypatch):
    """What --quick and --rows leave out."""
    whole = json.loads((published.ROOT / "results" / "bench.json").read_text())
    monkeypatch.setattr(published, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    left = {**whole, "rows": whole["rows"][:2]} if part == "rows" else {k: v for k, v in whole.items() if k != part}
    (tmp_path / "results" / "bench.json").write_text(json.dumps(left))
    with pytest.raises(SystemExit, match="results/bench.json is a part of the bench"):
        pages.rewritten("<!-- report: gathered -->\n<!-- end -->")


def test_a_row_that_failed_has_no_line_and_says_why():
    result = json.loads((published.ROOT / "results" / "network.json").read_text())
    row = find(result, "fsdp2")
    left = {key: row[key] for key in ("name", "kind", "dtype")}
    row.clear()
    row.update(left, step_ms=None, vs_reference=None, max_abs_diff=None, error="rank 1: it broke")
    text = sheet_text(line_sheet(result))
    assert cells(text, "fsdp2") == ["fsdp2", *[NONE] * 7] and "fsdp2: rank 1: it broke" in text


def copied(tmp_path):
    return shutil.copytree(published.ROOT, tmp_path / "copy", ignore=IGNORED)


def test_a_locale_without_unicode_changes_nothing(tmp_path):
    copy = copied(tmp_path)
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for env in (None, ascii_only):  # after the first the tables are those of results/, in any case
        run = subprocess.run([sys.executable, "-m", "harness.report"], cwd=copy, env=env, capture_output=True,
                             text=True, timeout=120)
        assert run.returncode == 0, run.stderr
    assert all(line.endswith("unchanged") for line in run.stdout.splitlines())


def test_a_terminal_that_knows_ascii_only_gets_the_tables_too():
    show = "import json; from harness.report import terminal; terminal.show(json.load(open('results/bench.json')))"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", show], cwd=published.ROOT, env=ascii_only, capture_output=True,
                         text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "stage 4 overlap" in run.stdout and "largest" in run.stdout and "|?|" in run.stdout


NO_NUMBER = {"step": 1, "where": "here", "loss": "low", "undisturbed": "low"}


@pytest.mark.parametrize("name, content", [("network.json", ""), ("faults.json", "{}"), ("bench.json", "[1]"),
                                           ("cuda.json", ""), ("bench_cuda.json", "{}"), ("cuda.json", None),
                                           ("faults.json", json.dumps({"journey": [NO_NUMBER]}))])
def test_damaged_results_are_one_line_and_nothing_is_written(name, content, tmp_path, monkeypatch):
    copy = copied(tmp_path)
    monkeypatch.setattr(published, "ROOT", copy)
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
    monkeypatch.setattr(published, "ROOT", copy)
    names = {"cpu": "bench_cuda.json", "cuda": "bench.json"}
    shutil.copy(copy / "results" / names[device], copy / "results" / name)
    with pytest.raises(SystemExit, match=f"^report: results/{name} must be measured with device {device}, .*$"):
        blocks.BLOCKS["bench" if device == "cpu" else "cuda"]()


def test_what_is_missing_is_named_with_its_command(tmp_path, monkeypatch):
    copy = copied(tmp_path)
    monkeypatch.setattr(published, "ROOT", copy)
    (copy / "results" / "bench_cuda.json").unlink()
    with pytest.raises(SystemExit, match='run make bench ARGS="--json results/bench_cuda.json" first$'):
        blocks.BLOCKS["cuda"]()


def test_a_bench_with_a_row_that_failed_is_a_part_of_it(tmp_path, monkeypatch):
    whole = json.loads((published.ROOT / "results" / "bench.json").read_text())
    find(whole, "stage 1 naive broadcast")["error"] = "rank 0: it broke"
    monkeypatch.setattr(published, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bench.json").write_text(json.dumps(whole))
    with pytest.raises(SystemExit, match="results/bench.json is a part of the bench"):
        pages.rewritten("<!-- report: bench -->\n<!-- end -->")


def test_accumulation_that_was_not_measured_is_said_to_be_so(monkeypatch):
    def without(name):
        found = load(name)
        for result in [found, *found.get("other_rates", [])] if name == "network.json" else []:
            result.pop("accumulation", None)
        return found
    load = published.load
    monkeypatch.setattr(published, "load", without)
    assert "Not measured: make network" in pages.rewritten("<!-- report: accumulation -->\n<!-- end -->")
