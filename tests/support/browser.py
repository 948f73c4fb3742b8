"""A headless Chromium that a test drives as a reader would, by its debugging protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.request
from base64 import b64decode
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60


class Browser:
    """One tab; `with Browser(folder) as browser` ends the process."""

    def __init__(self, profile: Path) -> None:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        self._process = subprocess.Popen(
            [str(CHROMIUM), *options, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._loop = asyncio.new_event_loop()
        self._sent = 0
        port = profile / "DevToolsActivePort"
        self._until(lambda: port.exists() and port.read_text().count("\n") == 1)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        with urllib.request.urlopen(address, timeout=SECONDS) as answer:
            tab = next(each for each in json.load(answer) if each["type"] == "page")
        url = tab["webSocketDebuggerUrl"]
        self._socket = self._run(self._connected(url))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(SECONDS)
        self._loop.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        return self._run(self._answer(self._socket, json.dumps(message)))

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")

    def wait_for(self, expression: str) -> Any:
        """Return the value of the expression as soon as that is true."""
        return self._until(lambda: self.evaluate(expression))

    def type(self, selector: str, text: str) -> None:
        """Type into an element in place of what it holds."""
        self.evaluate(f"document.querySelector({selector!r}).focus()")
        self.evaluate(f"document.querySelector({selector!r}).select()")
        for key in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Write a picture of the page in a window of this size."""
        size = {"width": width, "height": height}
        self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, mobile=False, **size)
        time.sleep(1)
        path.write_bytes(b64decode(self.call("Page.captureScreenshot")["data"]))

    @staticmethod
    async def _connected(url: str) -> WebSocketClientConnection:
        return await websocket_connect(url, max_message_size=2**27)

    async def _answer(self, socket: WebSocketClientConnection, message: str) -> Any:
        await socket.write_message(message)
        while (text := await socket.read_message()) is not None:
            answer = json.loads(text)
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]
        raise ConnectionError("the browser has closed the connection")

    def _run(self, task: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(task, SECONDS))

    def _until(self, condition: Any) -> Any:
        end = time.monotonic() + SECONDS
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {SECONDS} s"
            assert self._process.poll() is None, "the browser has ended"
            time.sleep(0.05)
        return value
