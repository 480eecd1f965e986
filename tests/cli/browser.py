"""A headless Chromium, driven over its debugging pipe: one process for many looks at a page."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage", "--mute-audio", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
PENDING = "CHROMIUM_PENDING"  # a file that is there as long as Chromium is being installed
LONGEST_S = 300.0


def find_chromium() -> str:
    """Its path, once it is installed where that goes on; where there is none, a skip says how to get it."""
    pending = os.environ.get(PENDING)
    deadline = time.monotonic() + LONGEST_S
    while pending and Path(pending).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip("needs Chromium: apt-get install chromium, or put one called so on the PATH")


class Browser:
    """A page in a new browser. errors: what the console or an exception said. requests: URLs asked for."""

    def __init__(self, profile: Path, path: str) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = [
            path,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *command],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, None
        (page,) = [t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        asked = {"targetId": page["targetId"], "flatten": True}
        self._session = self._ask("Target.attachToTarget", **asked)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        self._process.terminate()
        self._process.wait(30)
        os.close(self._from)

    def open(self, url: str) -> None:
        """Loads a page and waits for its load event."""
        for each in ("about:blank", url):  # another place in the same page would load nothing
            self._loaded = False
            self._ask("Page.navigate", url=each)
            while not self._loaded:
                self._event(self._message())

    def run(self, script: str) -> Any:
        """The value of a script; of a promise, what it becomes."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def show(self, place: str) -> None:
        """Goes to a place within the page, and waits until it is drawn."""
        self.run(
            f"new Promise((done) => {{ const to = {json.dumps(place)};"
            " if (location.hash === to) return done();"
            " addEventListener('hashchange', () => setTimeout(done), {once: true}); location.hash = to; })"
        )

    def emulate(self, *, dark: bool, width: int = 1280, height: int = 900) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", features=features)
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def key(self, name: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code)

    def screenshot(self) -> bytes:
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._event(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], LONGEST_S)
            read = os.read(self._from, 1 << 20) if ready else b""
            assert read, f"Chromium said nothing, exit code {self._process.poll()}"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _event(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
