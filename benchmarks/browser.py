"""A headless Chromium, driven over the two pipes of its debugging protocol. Chromium is the only dependency.

Messages are JSON objects that end with a zero byte. Every wait has a deadline, and its error names what it waited for.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE = 20.0  # seconds


class BrowserError(RuntimeError):
    """Chromium reported an error or did not answer."""


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page in one browser. `said` holds the output of its console and its uncaught errors."""

    def __init__(self, width: int = 1360, height: int = 860, *, dark: bool = False, scale: float = 1.0) -> None:
        path = find_chromium()
        assert path is not None, "ask find_chromium first"
        self._home = tempfile.TemporaryDirectory(prefix="rally-chromium-", ignore_cleanup_errors=True)
        self._size = (width, height)
        self._number = 0
        self._rest = b""
        self.said: list[str] = []
        self._start(path, scale)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def _start(self, path: str, scale: float) -> None:
        self._session = None
        here_in, self._out = os.pipe()
        self._in, here_out = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", "--hide-scrollbars", f"--user-data-dir={self._home.name}",
            f"--force-device-scale-factor={scale}", "--allow-file-access-from-files=false",
        ]  # fmt: skip
        # The protocol has fixed numbers: the browser reads from 3 and writes to 4.
        wire = f'exec "$0" "$@" 3<&{here_in} 4>&{here_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", wire, path, *options],
            pass_fds=(here_in, here_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(here_in)
        os.close(here_out)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._session = None
        self._send("Browser.close")
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._home.cleanup()

    def open(self, url: str) -> None:
        """Navigate to the address and wait until the page is loaded."""
        self.evaluate("window.__before = true")
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !window.__before")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = DEADLINE) -> Any:
        """Wait until the expression is true and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.evaluate(condition):
                return value
            time.sleep(0.03)
        raise BrowserError(f"not within {seconds} s: {condition}; the page said {self.said}")

    def text(self, selector: str = "body") -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def hover(self, selector: str) -> None:
        """Move the pointer to the middle of an element."""
        self._mouse("mouseMoved", *self._middle(selector))

    def hover_at(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y)

    def click(self, selector: str) -> None:
        x, y = self._middle(selector)
        self._mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=0, mobile=False)

    def screenshot(self, path: Path) -> None:
        time.sleep(0.15)  # one more frame, for what was drawn last
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _middle(self, selector: str) -> tuple[float, float]:
        found = self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'nearest', inline: 'nearest'}); const b = e.getClientRects()[0];"
            "return b && [b.left + b.width / 2, b.top + b.height / 2] })()"
        )
        return found[0], found[1]

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, **params)
        return self._until(lambda message: message.get("id") == number, method)

    def _send(self, method: str, **params: Any) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._number

    def _until(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE
        while True:
            message = self._receive(end, what)
            self._listen(message)
            if wanted(message):
                if "error" in message:
                    raise BrowserError(f"{what}: {message['error']['message']}")
                return dict(message["result"])

    def _receive(self, end: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise BrowserError(f"chromium did not answer {what} within {DEADLINE} s")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _listen(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(arg.get("value")) for arg in params["args"]))
        elif message.get("method") == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
