"""The page in a headless Chromium: it draws every plot without an error and without a request, at both widths and schemes."""

import signal
from pathlib import Path

import pytest

from fastps.lab.demo import comparison
from fastps.report import page, run
from tests.lab.demo.test_comparison import ROWS
from tests.report.traces import BEGIN, MS, asp, bsp, with_end
from tests.support.browser import browser, executable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NO_WIDER = "document.scrollingElement.scrollWidth <= innerWidth"
COLOUR = "getComputedStyle(document.body).backgroundColor"
DRAWN = (
    "[...document.querySelectorAll('div.plot')].map((plot) => plot.classList.contains('js-plotly-plot')"
    " && plot.querySelectorAll('.main-svg path, .main-svg image').length > 2)"
)
BARS = "document.querySelectorAll('#timeline .barlayer .point').length"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("plotly")
    executable()
    folder = tmp_path_factory.mktemp("pages")
    killed = with_end(bsp([10, 30, 10, 10], 200, {2: 60}), 2, -signal.SIGKILL, BEGIN + 2000 * MS)
    made = {
        "killed": run.page_of(killed, "run.trace"),
        "one": run.page_of(asp([5], 60), "one.trace"),
        "compare": comparison.page_of(ROWS, "mnist5k"),
    }
    files = {name: folder / f"{name}.html" for name in made}
    for name, each in made.items():
        page.write(each, files[name])
    return files


@pytest.mark.parametrize(("name", "count"), [("killed", 7), ("one", 5), ("compare", 5)])
def test_a_page_draws_all_plots_without_an_error_at_every_width_and_in_both_schemes(
    name: str, count: int, pages: dict[str, Path]
) -> None:
    with browser() as tab:
        backgrounds = set()
        for width in (1440, 390):
            for scheme in ("light", "dark"):
                tab.open(pages[name], width, scheme=scheme)
                assert tab.run(DRAWN) == [True] * count, (width, scheme)
                assert tab.run(NO_WIDER), f"{name} is wider than {width}"
                backgrounds.add((scheme, tab.run(COLOUR)))
        assert len(backgrounds) == 2 and len({colour for _, colour in backgrounds}) == 2
        assert tab.errors == []
        assert {address for address in tab.requests if not address.startswith("data:")} == {pages[name].resolve().as_uri()}


def test_the_straggler_and_the_killed_worker_are_seen_without_scrolling(pages: dict[str, Path]) -> None:
    with browser() as tab:
        tab.open(pages["killed"], 1440, 900)
        for text in ("Worker 2 was killed by SIGKILL", "Worker 1 is the straggler", "killed at 2 s", "straggler, 3.0 times"):
            bottom = tab.run(
                "Math.max(...[...document.querySelectorAll('strong, text')].filter((each) => each.textContent.includes("
                f"{text!r})).map((each) => each.getBoundingClientRect().bottom))"
            )
            assert bottom is not None and 0 < bottom < 900, text


def test_zooming_in_shows_steps_and_the_scheme_may_change(pages: dict[str, Path]) -> None:
    with browser() as tab:
        tab.open(pages["killed"], 1440)
        assert "short intervals" in tab.run("document.querySelector('.shown').textContent")
        tab.run("[...document.querySelectorAll('.windows button')].find((each) => each.textContent.includes('killed')).click()")
        tab.wait("document.querySelector('.shown').textContent.includes('each drawn')")
        assert 20 < tab.run(BARS) < 1000
        ink = "document.querySelector('#timeline .xtick text').style.fill"
        light = tab.run(ink)
        tab.size(1440, scheme="dark")
        tab.wait(f"{ink} !== {light!r}")
        assert "each drawn" in tab.run("document.querySelector('.shown').textContent"), "the zoom stays"
        assert tab.errors == []
