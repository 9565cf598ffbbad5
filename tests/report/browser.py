"""A headless Chromium, spoken to in the DevTools protocol over its own pipe (no WebSocket).

Protocol: one JSON message after another, each ended by a zero byte; commands go in on the
browser's descriptor 3, answers and events come out on 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((path for path in map(shutil.which, NAMES) if path), None)
SECONDS = 60
PLAIN = {"deviceScaleFactor": 1, "mobile": False}


class Browser:
    """One browser with one page; events are kept in `events`."""

    def __init__(self, profile) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += ["--disable-background-networking", "--no-first-run", f"--user-data-dir={profile}"]
        redirected = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, PROGRAM, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.events = []
        self._buffer = b""
        self._count = 0
        self._session = None
        target = self._page()
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **parameters):
        """Send a command and wait for its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == message["id"])
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, address, width=1200, dark=False):
        """Load a page at a width, in light or dark, and wait for it."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, **PLAIN)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self("Page.navigate", url=address)
        self._until(lambda found: found.get("method") == "Page.loadEventFired")

    def value(self, expression):
        """Evaluate JavaScript in the page, outside its content policy."""
        result = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    def picture(self, clip) -> bytes:
        """A PNG of a part of the page: x, y, width, height in pixels of the page, and scale."""
        taken = self("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(taken["data"])

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(SECONDS)

    def _page(self):
        while True:
            for target in self("Target.getTargets")["targetInfos"]:
                if target["type"] == "page":
                    return target["targetId"]
            time.sleep(0.1)

    def _until(self, wanted):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            while b"\0" in self._buffer:
                message, self._buffer = self._buffer.split(b"\0", 1)
                found = json.loads(message)
                if "method" in found:
                    self.events.append(found)
                if wanted(found):
                    return found
            if select.select([self._read], [], [], 1.0)[0]:
                self._buffer += os.read(self._read, 1 << 20)
        raise TimeoutError(f"the browser has not answered in {SECONDS} s")
