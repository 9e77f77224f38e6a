"""A page in a headless chromium, driven by chromium's DevTools protocol.

Chromium serves the protocol on a websocket, and Jupyter's server already depends on a websocket
client. So no browser driver is needed.
"""

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from tests.eventually import HUNG_S, pause_s

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35}
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find() -> str | None:
    """Return the browser's path; None if no browser is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page of the browser.

    Args:
        url: Websocket URL of the page's DevTools.
    """

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=HUNG_S, suppress_origin=True)
        self._numbers = itertools.count(1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + HUNG_S
        while True:
            began = time.monotonic()
            if value := self.evaluate(expression):
                return value
            now = time.monotonic()
            assert now < deadline, f"never true: {expression}; {self.text()[-3000:]}"
            time.sleep(pause_s(now - began, 0.05))

    def text(self) -> str:
        """Return the text that the page shows."""
        found: str = self.evaluate("document.body ? document.body.innerText : ''")
        return found

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def type(self, text: str) -> None:
        """Type text at the cursor."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key."""
        values = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **values)
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Set the size of the window in CSS pixels, and the number of device pixels for each."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def picture(self, clip: dict[str, float] | None = None) -> bytes:
        """Return a PNG of the window, or of a part of it (x, y, width, height)."""
        part = {} if clip is None else {"clip": {**clip, "scale": 1}}
        return base64.b64decode(self.call("Page.captureScreenshot", **part)["data"])


@contextmanager
def open_page(executable: str, profile: Path) -> Iterator[Page]:
    """Start a browser and yield its page; end the browser after the block.

    Args:
        executable: Path of the browser.
        profile: Folder to create for the browser's profile.
    """
    profile.mkdir(parents=True)
    command = [executable, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        page = Page(_page_url(process, profile / "DevToolsActivePort"))
        page.resize(1200, 1100)
        try:
            yield page
        finally:
            page._socket.close()
    finally:
        process.terminate()
        process.wait(timeout=HUNG_S)


def _page_url(process: "subprocess.Popen[bytes]", port_file: Path) -> str:
    deadline = time.monotonic() + HUNG_S
    while not (port_file.exists() and port_file.read_text().count("\n")):
        assert process.poll() is None, f"the browser ended with code {process.returncode}"
        assert time.monotonic() < deadline, "the browser does not listen"
        time.sleep(0.05)
    port = port_file.read_text().splitlines()[0]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=HUNG_S) as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
        if pages:
            found: str = pages[0]["webSocketDebuggerUrl"]
            return found
        assert time.monotonic() < deadline, "the browser opens no page"
        time.sleep(0.05)
