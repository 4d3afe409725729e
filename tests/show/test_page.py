"""docs/watch.html and the pictures: of the present cores; what they move is what is sent; and in a real browser."""

import base64
import contextlib
import gzip
import importlib.util
import itertools
import json
import re
import shutil
from xml.etree import ElementTree

import pytest

from harness.measuring import ledger
from harness.planning import alone
from harness.training import options
from harness.training.rows import LADDER, RowId
from show import beats, hero, page, scenes
from show.frames import memory_after
from show.picture import THEMES
from tests.ranks import ROOT, run_module


def data_of(text):
    """Return what a page holds, and the text of the page without it."""
    head, packed, tail = re.split(r'(?<=id="data">)(.*?)(?=</script>)', text, maxsplit=1, flags=re.DOTALL)
    return json.loads(gzip.decompress(base64.b64decode(packed))), head + tail


TEXT = page.PAGE.read_text(encoding="utf-8")
DATA, REST = data_of(TEXT)
PROGRAMS = {program["id"]: program for program in DATA["programs"]}
STAGES = list("01234")
IDEAS = ["idea", "idea-2", "idea-8"]
BUGS = [shown.id for shown in page.SHOWN if shown.is_bug]
NEW = "make show HTML=1"
PICTURES = scenes.pictures(PROGRAMS)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

each_scene = pytest.mark.parametrize("id", scenes.SCENES)
each_stage = pytest.mark.parametrize("id", STAGES)


def test_the_page_is_written_anew_after_a_change():
    assert (DATA, REST) == data_of(page.page(DATA["programs"])), NEW
    assert [program["id"] for program in DATA["programs"] if "short" in program] == [shown.id for shown in page.SHOWN]


def test_pictures_are_drawn_from_the_recordings_of_the_page_and_all_is_small_and_needs_nothing_else():
    for name, picture in PICTURES.items():
        for theme in THEMES:
            text = (ROOT / "results" / f"{name}{theme}.svg").read_text(encoding="utf-8")
            assert text == picture.svg(theme), f"{name}{theme}: {NEW}"
            assert len(text.encode()) <= 80_000
            ElementTree.fromstring(text)
    assert len(TEXT.encode()) < 700_000
    assert not re.search(r'(?:src|href)="(?!data:|\.\./|#|\$)|@import|url\((?!#)|https?://(?!www\.w3\.org/)', REST)


def test_make_show_writes_the_same_page_with_one_program_alone(monkeypatch, tmp_path):
    """What records is replaced by what the page has: test_recorder.py records."""
    monkeypatch.setattr(page, "recorded", {shown.program: PROGRAMS[shown.id] for shown in page.SHOWN}.get)
    monkeypatch.setattr(page, "ALONE", tmp_path / "show.html")
    page.write_alone("4")
    assert data_of(page.ALONE.read_text()) == ({"programs": [PROGRAMS["4"]]}, REST)


# --------------------------------------------------------------------------------------- what moves is what is sent


def value_of(formula, program):
    """Compute a formula of the page, for 16 parameters."""
    for words, code in (("two buckets", "2*4*4"), ("padding", "3*4"), ("Ψ", "*16"), ("·", "*")):
        formula = formula.replace(words, code)
    return eval(formula, {"d": program["ranks"]})


def held_bytes(program, frame):
    """Return the bytes that a rank holds after a frame, on average."""
    memory = memory_after(program, frame)
    return sum(program["storages"][storage]["nbytes"] for storage in memory if memory[storage]) / program["ranks"]


@pytest.mark.parametrize("id", [*IDEAS, *STAGES])
def test_a_program_sends_and_holds_the_bytes_of_its_formulas_and_says_so(id):
    program = PROGRAMS[id]
    formula = program["formula"]
    n_cells = sum(move[4] for operation in program["operations"] for move in operation["moves"])
    assert 4 * n_cells == program["ranks"] * program["sent_bytes"]
    assert value_of(formula["sent"], program) == program["sent_bytes"]
    assert any(f" {program['sent_bytes']:g} B" in beat["says"] for beat in program["beats"])
    after_step = beats.visits(program, "optimizer.zero_grad()")[0].frame - 1
    assert value_of(formula["held"], program) == held_bytes(program, after_step) == formula["held_bytes"]


@each_scene
def test_a_scene_moves_the_bytes_of_its_program_and_says_so(id):
    picture = PICTURES[f"watch_{id}"]
    assert sum(map(len, picture.flights.values())) == PROGRAMS[id]["sent_bytes"]  # 4 bytes a cell, by 4 ranks
    ends = {spans[-1][1]: text for text, spans in picture.texts.items() if "has sent" in text}
    assert f"each rank has sent {PROGRAMS[id]['sent_bytes']:g} B (DDP: 96 B" in ends[max(ends)]


@pytest.mark.parametrize("system", hero.SYSTEMS, ids=lambda system: system.title)
def test_the_first_picture_moves_the_bytes_of_an_all_reduce_and_its_clock_is_the_ladders(system):
    """A cell is a quarter of the parameters; `sent` is in values per parameter."""
    picture = hero.Picture("", 1, 100, 0)
    hero.draw(picture, 0, system, 0)
    sent = sum(map(len, picture.flights.values())) / 4 / 4
    assert sent == ledger.wire_bytes("all_reduce", 1, 4, "nccl")
    assert any(f"{system.held_bytes} bytes, and sends {sent:g} values" in text for text in picture.texts)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    row = {"DDP": "DDP", "Stage 3": "3 grad buffer", "Stage 4": "4 overlap"}[system.title]
    (titles,) = re.findall(r"^\| stage \|.*$", readme, re.MULTILINE)
    (cells,) = re.findall(rf"^\| {row}.*$", readme, re.MULTILINE)
    measured = dict(zip(titles.split(" | "), cells.split(" | ")))["time ÷ DDP's"]
    assert round(system.end / hero.SYSTEMS[0].end, 2) == float(measured), "a length isn't what README.md has"


@each_scene
def test_a_scene_has_eight_to_twelve_captions_of_two_lines_and_one_thing_moves_at_a_time(id):
    times = scenes.timetable(PROGRAMS[id])
    starts = [second for second, _ in times.captions]
    assert 8 <= len(starts) <= 12
    assert all(2 <= stop - start <= 9 for start, stop in itertools.pairwise([*starts, times.end]))
    assert all(len(beat["caption"]) <= 112 for _, beat in times.captions)
    assert all(later.start >= earlier.stop for earlier, later in itertools.pairwise(times.flights))
    first = next(beat for _, beat in times.captions if "garbage" in beat["caption"])
    assert "nobody reads it" in first["caption"], "what garbage is stands where it is first seen"


# ----------------------------------------------------------------------------------------------------------- beats


@pytest.mark.parametrize("id", ["idea", *STAGES, *BUGS])
def test_beats_are_those_of_the_file(id):
    program = PROGRAMS[id]
    assert program["beats"] == beats.resolved(id, program, PROGRAMS.get(program.get("beside"))), NEW
    at = [beat["frame"] for beat in program["beats"]]
    assert at == sorted(at)
    rows = {storage["row"] for storage in program["storages"]}
    for beat in program["beats"]:
        assert len(beat["says"]) < 200 and beat["look"] in {"", *rows}


@pytest.mark.parametrize("id", PROGRAMS)
def test_what_flies_goes_from_rank_to_rank_and_a_sum_is_drawn_when_all_of_it_has_arrived(id):
    program = PROGRAMS[id]
    for operation in program["operations"]:
        waiting = memory_after(program, operation["end"] - 1)
        for (sender, receiver, *_), move in zip(operation["arrows"], operation["moves"]):
            source, _, target, first, n_cells = move
            assert [program["storages"][storage]["rank"] for storage in (source, target)] == [sender, receiver]
            kinds = {cell.kind for cell in waiting[target][first : first + n_cells]}
            assert "average" not in kinds or operation["kind"] != "reduce-scatter"


def n_differences(wrong, frame, right, other_frame):
    """Return how many cells, garbage aside, differ between a frame of one run and a frame of the other."""
    def values_by_name(program, frame):
        return {(storage["rank"], storage["row"], storage["part"], index): cell.value
                for number, cells in memory_after(program, frame).items() if cells
                for storage in [program["storages"][number]] for index, cell in enumerate(cells)
                if cell.kind not in ("garbage", "unset")}

    mine = values_by_name(wrong, frame)
    theirs = values_by_name(right, other_frame)
    return sum(mine[name] != theirs[name] for name in mine.keys() & theirs.keys())


def last_frame_of(program, phase):
    """Return the last frame of a phase of the first step."""
    return max(number for number, frame in enumerate(program["frames"])
               if (frame["step"], frame["phase"]) == (0, phase))


@pytest.mark.parametrize("bug", BUGS)
def test_the_first_beat_of_a_bug_is_where_the_runs_part(bug):
    wrong = PROGRAMS[bug]
    right = PROGRAMS[wrong["beside"]]
    first = wrong["beats"][0]["frame"]
    assert all(n_differences(wrong, beat["frame"], right, beat["right"]) for beat in wrong["beats"])
    end = last_frame_of(wrong, "forward")
    assert end < first
    assert n_differences(wrong, end, right, last_frame_of(right, "forward")) == 0
    edit = wrong["edit"]
    _, before, after = next(shown.program.edit for shown in page.SHOWN if shown.id == bug)
    assert (edit["gone"], edit["come"]) == (before.splitlines(), len(after.splitlines()))


# ------------------------------------------------------------------------------------------------- in a browser


def in_a_browser(test):
    is_missing = not (CHROMIUM and importlib.util.find_spec("playwright"))
    reason = "needs chromium and playwright: pip install .[browser]"
    return pytest.mark.waits(pytest.mark.skipif(is_missing, reason=reason)(test))


@pytest.fixture(scope="module")
def started():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM) as chromium:
        yield chromium


@contextlib.contextmanager
def opened(started, place="", width=1280, height=800, path=page.PAGE, **settings):
    """Open a page at a program's beat, like "4.7", or line, "4/118". Fail if it logs or requests anything else."""
    with started.new_context(viewport={"width": width, "height": height}, **settings) as context:
        context.set_default_timeout(300_000)  # ms: of a busy machine
        shown = context.new_page()
        logged = []
        requests = []
        for event in ("console", "pageerror"):
            shown.on(event, lambda said: logged.append(str(said)))
        shown.on("request", lambda request: requests.append(request.url))
        shown.goto(f"{path.as_uri()}#{place}")
        shown.wait_for_selector("body[data-ready]")
        yield shown
        assert logged == []
        assert requests == [path.as_uri()]


def where(shown):
    """Return what the page says of its place, such as "beat 3"."""
    return re.match(r"\w+ \d+(?= of)", shown.inner_text("#where"))[0]


def play(shown):
    """Play to the end, at 20 times the speed."""
    shown.evaluate("() => { speed = 20; }")
    shown.click("#play")
    shown.wait_for_function("() => !now.playing")


@in_a_browser
@pytest.mark.parametrize("scheme, theme", [("light", ""), ("dark", "_dark")])
def test_pictures_play_as_images(started, tmp_path, scheme, theme):
    """In a <picture> of two sources, as GitHub shows them; the clock of an image can't be set, so it begins late."""
    dark = '<source media="(prefers-color-scheme: dark)" srcset="at_dark.svg">'
    (tmp_path / "page.html").write_text(f'<picture>{dark}<img src="at.svg"></picture>')
    for name, picture in PICTURES.items():
        shots = set()
        for second in (0.5, picture.seconds / 2, picture.seconds - 1):
            late = f"<style>*{{animation-delay:-{second}s!important;animation-play-state:paused!important}}"
            for source in THEMES:
                text = picture.svg(source).replace("<style>", late)
                (tmp_path / f"at{source}.svg").write_text(text, encoding="utf-8")
            with started.new_context(color_scheme=scheme) as context:
                shown = context.new_page()
                shown.goto((tmp_path / "page.html").as_uri())
                image = shown.locator("img")
                assert image.evaluate("(image) => image.currentSrc").endswith(f"at{theme}.svg")
                shots.add(image.screenshot())
        assert len(shots) == 3, name


FLOWN = """async () => {
    let flown = 0;
    new MutationObserver((all) => all.forEach((one) => { flown += one.addedNodes.length; }))
        .observe($("flying"), { childList: true });
    speed = 12;
    while (!isLast()) await new Promise((done) => setTimeout(done, (step(1) || 0) / speed + 50));
    return flown; }"""


@in_a_browser
@pytest.mark.parametrize("program", [*IDEAS, *STAGES])
def test_the_page_flies_the_cells_that_are_sent(started, program):
    """Each message once, in whichever beat; of `idea` in both panels; and none where motion is unwanted."""
    sent_bytes = PROGRAMS[program]["ranks"] * PROGRAMS[program]["sent_bytes"]
    if program in IDEAS:
        sent_bytes *= 2
    for motion, wanted in (("no-preference", sent_bytes), ("reduce", 0)):
        with opened(started, program, reduced_motion=motion) as shown:
            assert 4 * shown.evaluate(FLOWN) == wanted
            assert f"sent {PROGRAMS[program]['sent_bytes']:g} B" in shown.inner_text("#meters")


GOES_BACK = """(n) => {
    const picture = (k) => { toFrame(k); return document.querySelector("main").innerHTML; };
    const there = Array.from({ length: n }, (_, k) => picture(k)).slice(-30);
    const back = there.map((_, i) => picture(n - 1 - i)).reverse();
    return there.every((one, i) => one === back[i]) && new Set(there).size > 15; }"""


@in_a_browser
@pytest.mark.parametrize("program", [*STAGES, *BUGS])
def test_it_opens_as_chapters_link_to_it_and_plays_to_the_end_and_back(started, program):
    """A bug opens where the runs part, with its edit, and wrong cells marked."""
    recording = PROGRAMS[program]
    first = recording["beats"][0]
    place = f"{program}/wrong" if program in BUGS else program
    with opened(started, place) as shown:
        assert where(shown) == "beat 1" and shown.inner_text("#says") == first["says"]
        if program in BUGS:
            assert shown.locator(".code-line.gone").count() == len(recording["edit"]["gone"])
            assert shown.locator(".code-line.come").count() == recording["edit"]["come"]
            n_wrong = n_differences(recording, first["frame"], PROGRAMS[recording["beside"]], first["right"])
            assert shown.locator(".cell.wrong").count() == n_wrong
        play(shown)
        assert where(shown) == f"beat {len(recording['beats'])}"
        assert shown.evaluate(GOES_BACK, len(recording["frames"]))


@in_a_browser
@each_stage
def test_what_changes_between_two_beats_is_marked(started, id):
    """Cells that are written, and bars of what is in flight, or has landed since the beat before."""
    recording = PROGRAMS[id]
    with opened(started, id, reduced_motion="reduce") as shown:
        for before, beat in itertools.pairwise(recording["beats"]):
            shown.keyboard.press("ArrowRight")
            assert shown.inner_text("#says") == beat["says"]
            cells_before = memory_after(recording, before["frame"])
            changed = set()
            for storage, cells in memory_after(recording, beat["frame"]).items():
                for index, (cell, old) in enumerate(zip(cells or [], cells_before.get(storage) or [])):
                    if cell.value != old.value:
                        changed.add((storage, index))
            marked = shown.locator(".memory .written").evaluate_all(
                "(all) => all.map((one) => [+one.dataset.s, +one.dataset.cell])")
            assert changed <= set(map(tuple, marked))
            operations = [operation for operation in recording["operations"]
                          if operation["start"] <= beat["frame"] and operation["end"] > before["frame"]]
            n_live = sum(operation["end"] > beat["frame"] for operation in operations)
            assert shown.locator(".bar.live").count() == n_live
            assert shown.locator(".bar.landed").count() == len(operations) - n_live


@in_a_browser
def test_keys_go_through_beats_lines_and_cells_and_reach_everything(started):
    n_lines = len(PROGRAMS["3"]["frames"])
    n_beats = len(PROGRAMS["3"]["beats"])
    with opened(started, "3") as shown:
        for key, place in (("ArrowRight", "beat 2"), ("ArrowLeft", "beat 1"), ("End", f"beat {n_beats}"),
                           ("Home", "beat 1"), ("ArrowDown", "line 2"), ("End", f"line {n_lines}"),
                           ("ArrowUp", f"line {n_lines - 1}"), ("ArrowRight", f"beat {n_beats}")):
            shown.keyboard.press(key)
            assert where(shown) == place, key
        shown.keyboard.press("?")
        assert shown.is_visible("#helptext")
        shown.focus(".cells")
        shown.keyboard.press("Enter")
        shown.keyboard.press("ArrowRight")
        assert re.match(r"rank 0 · parameters p0\[1\] = ", shown.inner_text("#inspector"))
        focused = "() => { const e = document.activeElement; return e.id || e.classList[0] || e.tagName; }"
        reached = set()
        for _ in range(90):
            shown.keyboard.press("Tab")
            reached.add(shown.evaluate(focused))
        wanted = "bugs predict help play back forward again lines up down slider cells code A"
        assert set(wanted.split()) <= reached


@in_a_browser
def test_a_package_of_ones_own_is_recorded_and_its_page_plays_line_by_line(started, tmp_path):
    """Stage 3's core with other names, in rows that show/layout.py doesn't know. The page has no beats, no formulas."""
    for source in shutil.copytree(ROOT / page.GRAD_BUFFER.package, tmp_path / "mine").glob("*.py"):
        source.write_text(source.read_text().replace("GradBuffer", "Store").replace(".flat", ".memory"))
    ended = run_module("show", "mine/", cwd=tmp_path, PYTHONPATH=ROOT)
    assert (ended.code, ended.stdout) == (0, "written to measured/show.html: open it in a browser\n"), ended.stderr
    with opened(started, path=tmp_path / "measured/show.html") as shown:
        shown.keyboard.press("ArrowRight")
        assert where(shown) == "line 2"
        play(shown)
        assert where(shown) == f"line {len(PROGRAMS['3']['frames'])}"
        assert shown.inner_text("#meters").startswith("sent 96 B")
        assert "Store.memory each rank: zero × 16" in shown.text_content(".memory")
        assert not any(map(shown.is_visible, ("#bugs", "#predict", "#lines", "#next")))


CONTRAST = """() => {
    const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map((v) => { v /= 255; return v <= .03928 ? v / 12.92
        : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
    const paper = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        if (!/, 0\\)$|transparent/.test(c)) return c; } };
    const poor = [];
    for (const e of document.querySelectorAll("p, b, i, a, button, label, code, span, output")) {
        if (!e.offsetParent || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
        const [a, b] = [light(getComputedStyle(e).color), light(paper(e))].sort((x, y) => y - x);
        if ((a + .05) / (b + .05) < 4.5) poor.push([e.textContent, (a + .05) / (b + .05)]);
    }
    return poor;
}"""
SWIPE = """([from, to]) => {
    const touch = (clientX) => [new Touch({identifier: 1, target: document.body, clientX, clientY: 300})];
    document.body.dispatchEvent(new TouchEvent("touchstart", {touches: touch(from), changedTouches: touch(from)}));
    document.body.dispatchEvent(new TouchEvent("touchend", {touches: [], changedTouches: touch(to)})); }"""
OVERFLOWS = """() => ["html", "main", "#panels"].map((one) => document.querySelector(one))
    .some((e) => e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight)"""


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width, height", [(390, 844), (1280, 800)])
def test_a_beat_fits_and_is_swiped_on_a_phone_and_a_desk_by_day_and_by_night(started, width, height, scheme):
    settings = {"color_scheme": scheme, "reduced_motion": "reduce", "has_touch": True}
    with opened(started, "0", width, height, **settings) as shown:
        for program in [*IDEAS, *STAGES, *BUGS]:
            for beat in range(len(PROGRAMS[program]["beats"])):
                shown.evaluate("([id, beat]) => select(id, beat)", [program, beat])
                assert not shown.evaluate(OVERFLOWS), (program, beat)
        assert all(one.is_visible() for one in shown.locator(":is(header, footer) :is(button, select, input)").all())
        shown.evaluate("() => select('4', 6)")
        assert shown.evaluate(CONTRAST) == []
        shown.evaluate(SWIPE, [300, 100])
        assert where(shown) == "beat 8"
        shown.evaluate(SWIPE, [100, 300])
        assert where(shown) == "beat 7"


@in_a_browser
def test_a_cell_says_who_wrote_it_and_the_end_of_a_stage_leads_to_the_next(started):
    with opened(started, f"3/{1 + last_frame_of(PROGRAMS['3'], 'sync_grads')}") as shown:
        assert "each rank: average (own) × 4, garbage × 12" in shown.text_content(".memory")
        shown.locator('.row[data-row="GradBuffer.flat"] .cells').nth(1).locator(".cell").nth(4).click()
        said = shown.inner_text("#inspector")
        for words in ("average over the ranks", "element 4 of p0", "rank 1 updates",
                      "in GradBuffer.reduce_scatter_grads", "reduce-scatter from rank 0, 2, 3"):
            assert words in said
    with opened(started, "idea.5") as shown:
        shown.click("#next")
        assert shown.inner_text("#says") == PROGRAMS["0"]["beats"][0]["says"]


@in_a_browser
def test_the_slider_changes_the_number_of_ranks_of_the_idea(started):
    with opened(started, "idea.2") as shown:
        for place, id in ((1, "idea-2"), (3, "idea-8"), (2, "idea")):
            shown.locator("#d").fill(str(place))
            d = PROGRAMS[id]["ranks"]
            assert shown.locator(".panel").first.locator(".rank").count() == d
            assert f"sent {64 * (d - 1) // d} B" in shown.inner_text("#meters")


@in_a_browser
@pytest.mark.parametrize("number, program, question, answer", [
    (3, "3", "Who will hold the average of element 1?", "rank 0"),
    (3, "4", "How many bytes will a rank send in this beat?", "12 B")])
def test_predict_first_hides_a_result_until_its_reader_has_chosen(started, number, program, question, answer):
    with opened(started, f"{program}.{number}") as shown:
        shown.check("#predict")
        shown.evaluate("() => document.activeElement.blur()")
        shown.keyboard.press("ArrowRight")
        assert where(shown) == f"beat {number}" and shown.inner_text("#question b") == question
        right = shown.get_by_role("button", name=answer, exact=True)
        right.click()
        assert "right" in right.get_attribute("class")
        shown.locator("#question button").last.click()
        assert where(shown) == f"beat {number + 1}"


BF16 = ["ddp bf16", "stage 1 bf16", "stage 2 bf16", "stage 3 bf16/bf16", "stage 3 bf16/fp32", "stage 4 bf16"]
SENT_TWICE = {"all_reduce": 2}  # of the bytes of a full tensor, times (d-1)/d; what isn't here: once


@in_a_browser
@pytest.mark.parametrize("model, d, bucket_mib", [("gpt2", 8, 100), ("7b", 1024, 1600)])
@pytest.mark.parametrize("is16, names", [(False, LADDER), (True, BF16)], ids=["fp32", "bf16"])
def test_the_calculator_holds_and_sends_what_make_plan_counts(started, model, d, bucket_mib, is16, names):
    """DDP and the four stages, within 2 %."""
    rows = [alone.record(RowId(name, bucket_mib if "stage 4" in name else None), options.PLANNED_MODELS[model], d)
            for name in names]
    at = {"psi": rows[0].numel, "ranks": d, "bucket": bucket_mib, "is16": is16}
    with opened(started, "calculator") as shown:
        calculated = shown.evaluate("(at) => calculate(at).map(([, , held, , sent]) => [held, sent])", at)
    for row, (held, sent) in zip(rows, calculated, strict=True):
        assert sum(held) == pytest.approx(sum(row.held.values()), rel=0.02)
        messages = sum(event.n_bytes * SENT_TWICE.get(event.kind, 1) for event in row.events if event.what == "launch")
        assert sent == pytest.approx(messages * (d - 1) / d, rel=0.02)


@in_a_browser
def test_the_calculator_has_models_and_the_bound_of_chapter_4(started):
    with opened(started, "bytes") as shown:
        assert shown.inner_text("#psi-is") == "6.75 billion"
        cases = {"both": 2.5 + 2.5, "backward": 1 + 5, "": 3 + 5}  # of a forward pass of 1 s, messages of 5 s
        for kind, seconds in cases.items():
            assert shown.evaluate("([link, kind]) => bound(3, link, kind)[0]", [5, kind]) == seconds
        shown.get_by_role("button", name="70B").click()
        assert shown.inner_text("#psi-is") == "69 billion"
