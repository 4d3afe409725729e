"""docs/watch.html: of the present cores, and in a real browser as it should be."""

import importlib.util
import json
import re

import pytest

from show import browser, figures, page, programs
from show.memory import Memory
from tests.ranks import ROOT

TEXT = browser.PAGE.read_text(encoding="utf-8")
DATA = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', TEXT, re.DOTALL)[1])
PROGRAMS = {program["id"]: program for program in DATA["programs"]}
BUGS = [one.id for one in programs.SHOWN if one.right]
NEW = "make show HTML=1"


def test_the_page_is_of_the_present_cores():
    assert DATA["stamp"] == programs.stamp(), f"a core or show/ has changed: {NEW}"
    assert TEXT == page.page(DATA["programs"], DATA["stamp"]), NEW
    assert list(PROGRAMS) == [one.id for one in programs.SHOWN]


def test_figures_are_those_of_the_page():
    for name, text in figures.all_figures(PROGRAMS).items():
        assert (ROOT / "results" / name).read_text(encoding="utf-8") == text, f"{name}: {NEW}"
        assert len(text.encode()) < 1_000_000


def test_the_page_is_small_and_needs_nothing_else():
    assert len(TEXT.encode()) < 1_500_000
    assert not re.search(r'(?:src|href)="(?!data:|\.\./|#)|@import|url\((?!#)|https?://(?!www\.w3\.org/)', TEXT)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_marked_where_values_begin_to_be_wrong(bug):
    differs, program = PROGRAMS[bug]["differs"], PROGRAMS[bug]
    assert 0 < differs["frame"] < len(program["frames"]) and differs["cells"]
    memory = Memory(program)
    for frame in program["frames"][: differs["frame"] + 1]:
        memory.take(frame)
    assert all(storage in memory.cells for storage, _ in differs["cells"])
    value, row = re.search(r"has (\S+) in ([\w.]+), not", differs["text"]).groups()
    storage, cell = differs["cells"][0]
    assert (memory.cells[storage][cell][0], program["storages"][storage]["row"]) == (float(value), row)


# ------------------------------------------------------------------------------------------------- in a browser


MISSING = (
    "no chromium"
    if browser.program() is None
    else "no playwright: pip install .[browser]"
    if importlib.util.find_spec("playwright") is None
    else ""
)
in_a_browser = pytest.mark.skipif(bool(MISSING), reason=f"the page isn't opened in a browser here: {MISSING}")


@pytest.fixture(scope="module")
def started():
    with browser.browser() as chromium:
        yield chromium


def where(shown):
    return int(re.match(r"frame (\d+) of", shown.inner_text("#where"))[1])


@pytest.mark.waits
@in_a_browser
@pytest.mark.parametrize("program", list(PROGRAMS))
def test_it_opens_and_plays_without_an_error_or_a_request(started, program):
    with browser.opened(started, f"{program}/1") as (shown, wrong, requests):
        n = len(PROGRAMS[program]["frames"])
        assert f"of {n} " in shown.inner_text("#where")
        shown.evaluate("(n) => { for (let k = 0; k < n; k++) go(k); }", n)
        shown.select_option("#speed", "25")
        shown.evaluate("(n) => go(n - 6)", n)
        shown.click("#play")
        shown.wait_for_function("() => !now.playing")
        assert where(shown) == n
        assert wrong == [] and requests == [browser.PAGE.as_uri()]


@pytest.mark.waits
@in_a_browser
def test_back_returns_the_same_picture(started):
    """By keys that the page is told of, so that nothing is drawn in between; real ones are in the next test."""
    there_and_back = """() => {
        const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        const picture = () => document.querySelector("main").innerHTML + document.querySelector("#intro").innerText;
        const there = [], back = [];
        for (let k = 0; k < 40; k++) {
            there.push(picture());
            press("ArrowRight");
        }
        for (let k = 0; k < 40; k++) {
            press("ArrowLeft");
            back.push(picture());
        }
        return [there, back];
    }"""
    with browser.opened(started, "4/60") as (shown, _, _):
        there, back = shown.evaluate(there_and_back)
        assert there == back[::-1] and len(set(there)) == 40


@pytest.mark.waits
@in_a_browser
def test_keys(started):
    with browser.opened(started, "3/1") as (shown, _, _):
        n = len(PROGRAMS["3"]["frames"])

        def after(key):
            shown.keyboard.press(key)
            return where(shown)

        assert [after(key) for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home")] == [2, 3, 2, n, 1]
        leaves = PROGRAMS["3"]["operations"][0]["arrows"][0][3]
        assert after("m") == leaves + 1
        assert after("m") == leaves + 2
        function = shown.evaluate("() => player('3').placeText(0, now.k)")
        after("f")
        assert shown.evaluate("() => player('3').placeText(0, now.k)").split(" in ")[1] != function.split(" in ")[1]
        shown.keyboard.press(" ")
        assert shown.evaluate("() => now.playing")
        shown.keyboard.press(" ")
        assert not shown.evaluate("() => now.playing")
        shown.keyboard.press("?")
        assert shown.is_visible("#helptext")
        shown.focus(".blocks")
        shown.keyboard.press("Enter")
        shown.keyboard.press("ArrowRight")
        assert re.match(r"rank 0 · parameters p0\[1\] = ", shown.inner_text("#inspector"))


@pytest.mark.waits
@in_a_browser
@pytest.mark.parametrize("program", "01234")
def test_the_last_frame_has_the_numbers_of_the_recording(started, program):
    with browser.opened(started, f"{program}/1") as (shown, _, _):
        shown.keyboard.press("End")
        row = shown.locator(".row").first
        assert sorted(row.locator(".cell.new").all_inner_texts()) == sorted(4 * [str(351 + e) for e in range(16)])
        assert row.locator(".cell.stale").count() == 0


@pytest.mark.waits
@in_a_browser
def test_what_ranks_hold_after_sync_grads_can_be_read_off(started):
    frame = max(k for k, one in enumerate(PROGRAMS["3"]["frames"]) if one["phase"] == "sync_grads")
    with browser.opened(started, f"3/{frame + 1}") as (shown, _, _):
        row = shown.locator(".row", has_text="GradBuffer.flat")
        assert "each rank: average (own) × 4, garbage × 12" in row.inner_text()
        for rank in range(4):
            cells = row.locator(".blocks").nth(rank).locator(".cell")
            kinds = [cells.nth(i).get_attribute("class").split()[1] for i in range(16)]
            assert kinds == ["average" if i // 4 == rank else "garbage" for i in range(16)]


@pytest.mark.waits
@in_a_browser
def test_a_cell_says_what_it_is_who_wrote_it_and_where_it_came_from(started):
    frame = PROGRAMS["3"]["operations"][0]["arrows"][0][4]
    with browser.opened(started, f"3/{frame + 1}") as (shown, _, _):
        shown.locator(".row", has_text="GradBuffer.flat").locator(".cell", has_text="156").first.click()
        said = shown.inner_text("#inspector")
        assert (
            "average over the ranks" in said and "parameter 1, element 0 (6 of 16)" in said and "rank 1 steps" in said
        )
        assert "in GradBuffer.reduce_scatter_grads" in said and "reduce-scatter from rank 0, 2, 3" in said


@pytest.mark.waits
@in_a_browser
def test_two_programs_side_by_side_on_one_clock(started):
    with browser.opened(started, "2/1") as (shown, wrong, _):
        shown.select_option("#beside", "3")
        n = int(re.search(r"of (\d+)", shown.inner_text("#where"))[1])
        look = """(n) => Array.from({length: n}, (_, k) => {
            go(k);
            return [player("2").frames[ticks[k][0]].phase, player("3").frames[ticks[k][1]].phase];
        })"""
        phases = set(map(tuple, shown.evaluate(look, n)))
        assert shown.locator(".panel").count() == 2
        assert ("sync_grads", "sync_grads") in phases and not {
            ("sync_grads", "step_own"),
            ("backward", "step_own"),
        } & phases
        assert wrong == []


@pytest.mark.waits
@in_a_browser
def test_predict_first_hides_a_result_until_its_reader_has_chosen(started):
    arrives = PROGRAMS["3"]["operations"][0]["arrows"][0][4]
    with browser.opened(started, f"3/{arrives}") as (shown, _, _):
        shown.check("#predict")
        shown.evaluate("() => document.activeElement.blur()")
        shown.keyboard.press("ArrowRight")
        answers = shown.locator("#question button")
        assert answers.count() == 3 and where(shown) == arrives
        shown.locator("#question button", has_text="garbage × 12").click()
        assert "right" in shown.locator("#question button", has_text="garbage × 12").get_attribute("class")
        shown.locator("#question button").last.click()
        assert where(shown) == arrives + 1


@pytest.mark.waits
@in_a_browser
@pytest.mark.parametrize("bug", BUGS)
def test_the_page_jumps_to_the_first_wrong_value(started, bug):
    with browser.opened(started, f"{bug}/1") as (shown, _, _):
        assert shown.locator(".cell.wrong").count() == 0
        shown.click("#differs")
        assert where(shown) == PROGRAMS[bug]["differs"]["frame"] + 1
        assert shown.locator(".cell.wrong").count() == len(PROGRAMS[bug]["differs"]["cells"])
        assert PROGRAMS[bug]["differs"]["text"] in shown.inner_text("#intro")


@pytest.mark.waits
@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_a_phone_and_a_desk_by_day_and_by_night(started, width, scheme):
    with browser.opened(started, "4/1", width=width, color_scheme=scheme, reduced_motion="reduce") as (shown, wrong, _):
        browser.two_buckets_under_way(shown)
        assert shown.locator(".lane").count() == 2
        assert shown.evaluate("() => document.documentElement.scrollWidth") <= width
        paper = shown.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        assert shown.evaluate("() => getComputedStyle(document.querySelector('.lane path')).animationName") == "none"
        assert shown.locator(".blocks[aria-label]").count() == shown.locator(".blocks").count() > 0
        assert len(shown.screenshot()) > 20_000 and wrong == []
