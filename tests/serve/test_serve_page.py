"""The page: what it is fed, and, in headless Chromium, what it does. Pictures go to docs/ if TANDEM_PICTURES is set."""

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from browser import Browser, find_chromium
from front_drive import TEXT, client_of, serving

from tandem.serve.live import FOLDER, HEADERS, Steps, spread
from tandem.serve.service import Service

DOCS = Path(__file__).parents[2] / "docs"
STORY = """Tides are the **rise and fall** of the sea, and they come from the Moon.

1. The Moon pulls on the water that is nearest to it, so the sea bulges there.
2. On the far side of the Earth there is a second bulge.
3. As the Earth turns, each coast passes through both: *two* high tides a day.

```python
def bulges(moon):
    return [moon.near_side, moon.far_side]
```

Ask `why` as often as you like. <b onclick="alert(1)">This is no markup.</b>
"""
in_chromium = pytest.mark.skipif(find_chromium() is None, reason="no chromium and chromedriver here")


async def complete(client: httpx.AsyncClient, **body: object) -> None:
    body = {"prompt": "a secret prompt", "max_tokens": 20, "ignore_eos": True, **body}
    assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_live_tells_figures_and_steps_but_no_prompt() -> None:
    async with serving(step_s=0.005) as (service, url), client_of(url) as client:
        fresh = (await client.get("/live")).json()
        assert fresh["steps"] == [] and fresh["visits"] == [] and fresh["ttft_s"] is None and fresh["alive"]
        busy = asyncio.ensure_future(complete(client, max_tokens=200, n=2))
        await asyncio.sleep(0.4)
        response = await client.get("/live")
        found = response.json()
        assert "secret" not in response.text and TEXT[:20] not in response.text
        assert found["running"] == 2 and found["open"] == 1 and found["kv"]["owned"] > 0
        visit = found["visits"][0]
        assert visit["answers"] == 2 and visit["tokens"] > 10 and visit["prompt_tokens"] == 15 and visit["ttft_s"] > 0
        assert found["itl_s"]["p50"] == pytest.approx(0.005, abs=0.003) and found["model"] == "served"
        numbers = [step[0] for step in found["steps"]]
        assert len(numbers) > 20 and numbers == sorted(set(numbers))
        for before, after in zip(found["steps"], found["steps"][1:], strict=False):
            _, spans, tokens, decodes, plan, planned, submitted, *_, began, computed, home = after
            assert plan <= planned <= submitted and planned <= began < computed <= home + 100
            assert spans >= 1 and tokens >= decodes and began >= before[-2]
        await asyncio.sleep(0.2)
        more = (await client.get(f"/live?after={numbers[-1]}")).json()
        assert more["steps"] and more["steps"][0][0] == numbers[-1] + 1
        await busy
        assert (await client.get("/live?after=x")).status_code == 400
        service.engine._host._loop._die(RuntimeError("gone"))
        assert (await client.get("/live")).json()["alive"] is False


async def test_many_pages_ask_the_engine_once() -> None:
    async with serving(step_s=0.002) as (service, url), client_of(url) as client:
        asked: list[str] = []
        call = service.engine.call

        async def counting(name: str, argument: str = "") -> object:
            asked.append(name)
            return await call(name, argument)

        service.engine.call = counting  # type: ignore[method-assign]
        await asyncio.gather(*(client.get("/live") for _ in range(30)))
        assert asked.count("steps") <= 2 and asked.count("metrics") <= 2


async def test_steps_are_kept_across_fetches_and_bounded() -> None:
    class Engine:
        error = None
        number = 0

        async def call(self, name: str, argument: str) -> dict:
            assert name == "steps" and int(argument.split()[0]) == self.number - 1
            steps = [(self.number + i, 1, 1, 1, *([100.0 + self.number + i] * 9), 0.0) for i in range(200)]
            self.number += 200
            return {"now_s": 100.0 + self.number, "depth": 2, "steps": steps}

    class Fake:
        engine = Engine()

    steps = Steps(Fake())  # type: ignore[arg-type]
    for _ in range(8):
        steps._fetched_s = 0.0
        await steps.refresh()
    assert len(steps.kept) == 1200 and [record[0] for record in steps.after(1594)] == [1595, 1596, 1597, 1598, 1599]
    assert steps.kept[-1][-1] == 0, "a moment that the runner does not give stays 0"
    assert steps.kept[-1][4] - steps.kept[-2][4] == 1_000_000


def test_spread_is_of_the_last_seconds_only() -> None:
    recent = [(t, float(t)) for t in range(100)]
    assert spread(recent, 99.0) == {"p50": 94.0, "p95": 99.0}
    assert spread(recent, 200.0) is None


async def test_the_pages_files_are_open_and_everything_else_needs_the_key() -> None:
    async with serving(keys=("k",)) as (_, url), client_of(url) as client:
        for path in ("/", *(f"/page/{file.name}" for file in FOLDER.iterdir())):
            response = await client.get(path)
            assert response.status_code == 200, path
            for name, value in HEADERS.items():
                assert response.headers[name] == value
        for path in ("/live", "/metrics", "/load", "/v1/models", "/page", "/pages", "//", "/page/../live"):
            response = await client.send(client.build_request("GET", url + path))
            assert response.status_code in (401, 404, 307), (path, response.status_code)
            assert response.status_code != 200


async def test_a_range_is_passed_over() -> None:
    """RFC 9110 lets a server give the whole; an error of the file server would have a body of its own."""
    async with serving() as (_, url), client_of(url) as client:
        for path in ("/", "/page/app.js"):
            whole = await client.get(path)
            for asked in ("bytes=5-1", "bytes=99999999-", "bytes=0-5", "lines=1"):
                answer = await client.get(path, headers={"range": asked, "if-range": '"x"'})
                assert answer.status_code == 200 and answer.content == whole.content, (path, asked)


def test_the_page_works_offline_and_is_packed() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text()
        addresses = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, f"{file.name} reaches out to {addresses}"
        assert "innerHTML" not in text and "eval(" not in text
    import tomllib

    packed = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tandem"]
    assert "serve/page/*" in packed


@contextlib.asynccontextmanager
async def busy_server(**options: object) -> AsyncIterator[tuple[Service, str]]:
    """A server with some clients that come and go."""
    options = {"step_s": 0.012, "script": STORY, "kv_cache_memory": 600 * 16 * 16384, "in_process": False, **options}
    async with serving(**options) as (service, url), client_of(url) as client:  # type: ignore[arg-type]

        async def come_and_go() -> None:
            while True:
                await asyncio.sleep(random.random())
                await complete(client, prompt="x" * random.randint(50, 900), max_tokens=random.randint(60, 500))

        tasks = [asyncio.ensure_future(come_and_go()) for _ in range(5)]
        try:
            yield service, url
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def drive(act: Callable[[Browser], None], **options: object) -> None:
    def run() -> None:
        with Browser(**options) as browser:  # type: ignore[arg-type]
            act(browser)

    await asyncio.to_thread(run)


def picture(browser: Browser, name: str) -> None:
    if os.environ.get("TANDEM_PICTURES"):
        browser.picture(DOCS / name)
        assert (DOCS / name).stat().st_size < 300_000


def no_overflow(browser: Browser) -> None:
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"


@in_chromium
async def test_a_chat_by_keyboard() -> None:
    """Ask, watch it stream, stop, begin anew; text of the model is never markup; nothing is fetched from elsewhere."""
    async with busy_server() as (service, url):

        def act(browser: Browser) -> None:
            browser.open(url + "/")
            browser.until("document.querySelector('#welcome-model').textContent.includes('served')")
            assert browser.run("return document.activeElement.id") == "prompt"
            browser.keys("Explain the tides to a child.", "Enter")
            streaming = browser.until("document.querySelector('.assistant .text')?.innerText")
            assert "Stop" in browser.text("#composer")
            browser.until("document.querySelector('.foot')?.dataset.done", 30)
            text = browser.text(".assistant .text")
            assert len(text) > len(streaming) and "alert(1)" in text and "<b onclick" in text
            assert browser.run("return document.querySelectorAll('.assistant b').length") == 0
            for kind, count in (("strong", 1), ("em", 1), ("ol > li", 3), ("pre code", 1)):
                assert browser.run(f"return document.querySelectorAll('.assistant {kind}').length") == count
            foot = browser.text(".foot")
            match = re.match(r"(\d+) tokens · ([\d.]+) tokens/s · first after \d+ ms", foot)
            assert match and int(match[1]) == len(STORY) + 1 and 40 < float(match[2]) < 90, foot
            browser.keys("And who found that out?", "Enter")
            browser.until("document.querySelectorAll('.assistant .text')[1]?.innerText.length > 60")
            picture(browser, "page-chat.png")
            aborted = service.meter.num_aborted
            browser.keys("Escape")
            browser.until("document.querySelectorAll('.foot')[1].dataset.done === 'stopped'", 3)
            for _ in range(100):
                if service.meter.num_aborted == aborted + 1:
                    break
                time.sleep(0.02)
            assert service.meter.num_aborted == aborted + 1
            browser.click("#fresh")
            assert browser.run("return document.querySelectorAll('.turn').length") == 0
            fetched = browser.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
            assert len(fetched) > 8 and all(name.startswith(url) for name in fetched) and browser.log() == []

        await drive(act)


@in_chromium
async def test_the_live_view_shows_what_the_engine_does() -> None:
    async with busy_server() as (_, url):

        def act(browser: Browser) -> None:
            browser.open(url + "/")
            browser.until("document.querySelector('#model').options.length")
            browser.run("document.querySelector('#tab-chat').focus()")
            browser.keys("Right")  # the tabs are one stop of the tab key, arrows choose
            assert browser.run("return location.hash") == "#live"
            browser.until("Number(document.querySelector('#tile-running .value').innerText) >= 1")
            browser.until("document.querySelectorAll('#requests tr').length >= 1")
            browser.until("document.querySelector('#zoom').textContent === '200 ms'")
            time.sleep(60.0 if os.environ.get("TANDEM_PICTURES") else 2.5)
            picture(browser, "page-live.png")
            seen = browser.run(COLOURS_OF_THE_TIMELINE)
            assert seen["slot-0"] > 0.05 and seen["slot-1"] > 0.05, "both slots are drawn"
            assert seen["slot-0"] == pytest.approx(seen["slot-1"], rel=0.4), "they take turns"
            assert "%" in browser.text("#tile-active .value") and "ms" in browser.text("#tile-itl .value")
            browser.run("document.querySelector('#timeline').focus()")
            browser.keys(" ", "+")
            assert browser.text("#pause") == "Go on" and browser.text("#zoom") == "100 ms"
            time.sleep(0.3)
            first = browser.run("return document.querySelector('#timeline').toDataURL()")
            time.sleep(0.3)
            assert browser.run("return document.querySelector('#timeline').toDataURL()") == first, "paused, it moves"
            browser.keys(" ")
            time.sleep(0.3)
            assert browser.run("return document.querySelector('#timeline').toDataURL()") != first
            assert browser.log() == []

        await drive(act, height=1060)


COLOURS_OF_THE_TIMELINE = """
const canvas = document.querySelector('#timeline');
const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
const found = {};
for (const name of ['slot-0', 'slot-1']) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  let count = 0;
  for (let i = 0; i < pixels.length; i += 4) count += pixels[i] === r && pixels[i + 1] === g && pixels[i + 2] === b;
  found[name] = count / (pixels.length / 4);
}
return found;
"""


@in_chromium
async def test_light_dark_and_narrow() -> None:
    async with busy_server() as (_, url):
        grounds = []

        def act(browser: Browser) -> None:
            for view in ("chat", "live"):
                browser.open(f"{url}/#{view}")
                browser.until(f"!document.querySelector('#{view}').hidden")
                browser.until("document.querySelector('#model').options.length")
                no_overflow(browser)
            grounds.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
            browser.click("#theme")
            browser.click("#theme")
            assert browser.run("return document.documentElement.dataset.theme") == "dark"

        await drive(act, width=360, height=740)
        await drive(act, width=1280, height=860, dark=True)
        assert grounds[0] != grounds[1], "the system's dark mode is followed"


@in_chromium
async def test_the_page_asks_for_the_key_and_shows_errors() -> None:
    async with serving(keys=("open sesame",), script="yes", max_model_len=64) as (_, url):

        def act(browser: Browser) -> None:
            browser.open(url + "/")
            browser.until("document.querySelector('#key-dialog').open")
            browser.keys("wrong", "Enter")
            browser.until("document.querySelector('#key-note').textContent.includes('does not know')")
            browser.keys("open sesame", "Enter")
            browser.until("document.querySelector('#model').options.length")
            assert browser.run("return document.querySelector('#key-dialog').open") is False
            assert "open sesame" not in json.dumps(
                browser.run("return [document.cookie, {...localStorage}, location.href]")
            )
            browser.run("document.querySelector('#prompt').focus()")
            browser.keys("far too long for this model, " * 3, "Enter")
            error = browser.until("document.querySelector('.error')?.textContent")
            assert "context" in error
            browser.run("document.querySelector('#max_tokens').value = 8")
            browser.click("#fresh")
            browser.keys("hi", "Enter")
            browser.until("document.querySelector('.foot')?.dataset.done === 'stop'")
            assert browser.text(".assistant .text") == "yes"

        await drive(act)
