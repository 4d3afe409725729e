"""The page in a real browser: Debian's chromium, headless, driven by playwright (`pip install .[browser]`)."""

import contextlib
import importlib.util
import shutil
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "watch.html"
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright")
MISSING = "no chromium" if not CHROMIUM else "" if HAS_PLAYWRIGHT else "no playwright: pip install .[browser]"


@contextlib.contextmanager
def browser():
    """A browser that was started for this, with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS) as started:
        yield started


@contextlib.contextmanager
def opened(started, place="", width=1280, height=800, **settings):
    """The page at `place`, like "4.7" or "4/118": program, and beat or line.

    -> (playwright's page, what went wrong, requests)
    """
    with started.new_context(viewport={"width": width, "height": height}, **settings) as context:
        context.set_default_timeout(300_000)  # ms: of a busy machine
        page, wrong, requests = context.new_page(), [], []
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"{PAGE.as_uri()}#{place}")
        page.wait_for_selector("body[data-ready]")
        yield page, wrong, requests


def figures(started=None):
    """-> {file name: text} of the SVG files that the chapters show, as the page draws them; by a browser that runs."""
    with contextlib.nullcontext(started) if started else browser() as started, opened(started) as (page, wrong, _):
        made = page.evaluate("() => figures()")
        if wrong:
            raise RuntimeError("; ".join(wrong))
        return made
