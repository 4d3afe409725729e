"""The page in a real browser: Debian's chromium, headless, driven by playwright (`pip install .[browser]`).

python -m show.browser           two screenshots for README.md, of docs/watch.html
"""

import contextlib
import shutil
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "watch.html"
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def program():
    """-> where chromium is, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def browser():
    """A browser that was started for this, with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program(), args=list(OPTIONS))
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def opened(started, place="", path=PAGE, width=1280, height=800, **settings):
    """The page at `place`, like "4/118": program and frame. -> (playwright's page, what went wrong, requests)"""
    context = started.new_context(viewport={"width": width, "height": height}, **settings)
    page, wrong, requests = context.new_page(), [], []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    try:
        page.goto(f"{path.as_uri()}#{place}")
        yield page, wrong, requests
    finally:
        context.close()


def two_buckets_under_way(page):
    """Go to the middle of the frames of stage 4's backward pass in which two buckets are under way."""
    page.evaluate("""() => {
        const p = player("4");
        const frames = p.frames.map((frame, k) => k).filter((k) => p.frames[k].phase === "backward"
            && p.operations.filter((one) => isUnderWay(one, k)).length === 2);
        select("4", "", frames[Math.floor(frames.length / 2)]);
    }""")


def main():
    results = PAGE.parents[1] / "results"
    with browser() as started:
        for scheme in ("light", "dark"):
            with opened(started, height=860, color_scheme=scheme, reduced_motion="reduce") as (page, _, _):
                two_buckets_under_way(page)
                page.screenshot(path=results / f"watch_{scheme}.png")
                print(f"results/watch_{scheme}.png")


if __name__ == "__main__":
    main()
