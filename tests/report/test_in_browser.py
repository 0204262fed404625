"""The page in a headless Chromium: it draws every plot without an error and without a request, at both widths and schemes."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastps.lab.demo import comparison
from fastps.report import page, run
from tests.lab.demo.test_comparison import ROWS
from tests.report.traces import BEGIN, MS, asp, bsp, with_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NO_WIDER = "document.scrollingElement.scrollWidth <= innerWidth"
COLOUR = "getComputedStyle(document.body).backgroundColor"
DRAWN = (
    "[...document.querySelectorAll('div.plot')].map((plot) => plot.classList.contains('js-plotly-plot')"
    " && plot.querySelectorAll('.main-svg path, .main-svg image').length > 2)"
)
BARS = "document.querySelectorAll('#timeline .barlayer .point').length"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 90.0


def executable() -> str:
    """The browser's program; skips the test where there is none."""
    found = next((path for path in map(shutil.which, _NAMES) if path), None)
    if found is None:
        pytest.skip("no chromium found: install it (on Debian: apt-get install chromium)")
    return found


@dataclass
class Tab:
    """One page. `errors` has what its console and its network complained about; `requests` the addresses it asked for."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _write: int = -1
    _read: int = -1
    _session: str = ""
    _number: int = 0
    _pending: bytes = b""
    _answers: dict[int, Any] = field(default_factory=dict)
    _events: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        self._until(lambda: self._number in self._answers, method)
        answer = self._answers.pop(self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript on the page; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, file: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        """Open a file at a size in a scheme of colours, and wait until it is drawn."""
        self.size(width, height, scheme)
        self._events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self._until(lambda: "Page.loadEventFired" in self._events, "the page's end of loading")
        self.wait("document.documentElement.dataset.drawn !== undefined")

    def size(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window and the scheme of colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640)
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 640)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript condition holds."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition} does not hold; the console has {self.errors}"
            time.sleep(0.05)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"the browser does not answer: {what}"
            if select.select([self._read], [], [], left)[0]:
                data = os.read(self._read, 1 << 16)
                assert data, "the browser has ended"
                self._pending += data
                *whole, self._pending = self._pending.split(b"\0")
                for message in whole:
                    self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        method, parameters = message["method"], message["params"]
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", parameters["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert", "warning"):
            self.errors.append(str([each.get("value", each) for each in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A tab of a browser that ends with the block, and all of its processes with it."""
    program = executable()
    down, up = os.pipe(), os.pipe()  # commands to the browser, its answers
    with tempfile.TemporaryDirectory(prefix="fastps-browser-", ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
            "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        script = f'exec "$@" 3<&{down[0]} 4>&{up[1]}'
        command, null = ["bash", "-c", script, "bash", program, *flags, "about:blank"], subprocess.DEVNULL
        process = subprocess.Popen(command, pass_fds=[down[0], up[1]], stdout=null, stderr=null, start_new_session=True)
        os.close(down[0])
        os.close(up[1])
        tab = Tab(_write=down[1], _read=up[0])
        try:
            target = tab.call("Target.createTarget", url="about:blank")["targetId"]
            tab._session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.call(f"{domain}.enable")
            yield tab
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            os.close(down[1])
            os.close(up[0])


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
