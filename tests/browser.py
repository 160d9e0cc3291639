"""A headless Chromium that tests look at a page with, over a pair of pipes (Chrome DevTools Protocol)."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BINARY = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
]  # fmt: skip
# The browser reads commands from file 3 and writes to file 4
BEGIN = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page. After `open`, `requests` holds every address that it asked for, `console` what it said."""

    def __init__(self):
        self.profile = tempfile.mkdtemp()
        to_browser, self.output = os.pipe()
        self.input, from_browser = os.pipe()
        begin = [sys.executable, "-c", BEGIN, str(to_browser), str(from_browser)]
        command = [*begin, BINARY, *FLAGS, f"--user-data-dir={self.profile}"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), **quiet)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in "Page", "Network", "Runtime", "Log":
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.output)  # the browser ends with its pipe
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.input)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _receive(self, timeout: float) -> dict | None:
        end = time.monotonic() + timeout
        while b"\0" not in self.buffer:
            if not select.select([self.input], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            received = os.read(self.input, 2**20)
            if not received:
                raise RuntimeError("the browser has ended")
            self.buffer += received
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method: str, **params) -> dict:
        """The result of one command of the protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while reply := self._receive(60):
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]
            self.events.append(reply)
        raise RuntimeError(f"the browser does not answer {method}")

    def look(self, width=1280, height=900, dark=False, script=True):
        """How the next page is seen."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)

    def open(self, path: Path):
        """Load a file, and wait until it is there."""
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        end = time.monotonic() + 300
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            if event := self._receive(max(0.1, end - time.monotonic())):
                self.events.append(event)
            assert time.monotonic() < end, "the page did not load"
        while event := self._receive(0.2):
            self.events.append(event)

    @property
    def requests(self) -> list[str]:
        sent = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [entry["request"]["url"] for entry in sent]

    @property
    def console(self) -> list[str]:
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in kinds]

    def value(self, expression: str):
        """What a JavaScript expression gives."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, name: str):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def picture(self, path: Path):
        """A PNG of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
