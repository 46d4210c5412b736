"""A headless Chromium over WebDriver's own protocol (W3C), in a few lines: what the page's tests need of it."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Right": "\ue014", "Left": "\ue012"}


def find_chromium() -> tuple[str, str] | None:
    """(browser, driver), or None where they are not installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One window. Use it as a context manager."""

    def __init__(self, width: int = 1280, height: int = 860, *, dark: bool = False) -> None:
        found = find_chromium()
        assert found is not None
        browser, driver = found
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([driver, f"--port={port}"], **quiet)  # type: ignore[call-overload]
        self._base = f"http://127.0.0.1:{port}"
        self._session = ""
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--force-device-scale-factor=1", f"--window-size={width},{height}"]  # fmt: skip
        if dark:
            words.append("--force-dark-mode=0")
        options = {"binary": browser, "args": words}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        for _ in range(100):
            try:
                self._session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})[
                    "sessionId"
                ]
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        self.command("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        ])  # fmt: skip
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def _send(self, method: str, path: str, body: dict | None = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._base + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def _do(self, method: str, path: str, body: dict | None = None) -> Any:
        return self._send(method, f"/session/{self._session}{path}", body)

    def command(self, name: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol."""
        return self._do("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, url: str) -> None:
        self._do("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._do("POST", "/execute/sync", {"script": script, "args": []})

    def until(self, script: str, timeout_s: float = 15.0) -> Any:
        """The first true value of an expression."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < deadline_s, f"never came true: {script}; {self.log()}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.run(f"return document.querySelector({selector!r}).innerText"))

    def click(self, selector: str) -> None:
        found = self._do("POST", "/element", {"using": "css selector", "value": selector})
        self._do("POST", f"/element/{found[ELEMENT]}/click")

    def keys(self, *what: str) -> None:
        """Press keys one after another, on whatever has the focus."""
        actions = []
        for key in (k for word in what for k in ([KEYS[word]] if word in KEYS else list(word))):
            actions += [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._do("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def log(self) -> list[str]:
        """Messages of the console: errors of scripts and of the security policy, files that were not found."""
        return [entry["message"] for entry in self._do("POST", "/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._do("GET", "/screenshot")))

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._do("DELETE", "")
        finally:
            self._process.terminate()
            self._process.wait(10)
