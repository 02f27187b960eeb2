"""Headless Chromium for tests, over ChromeDriver's W3C protocol; nothing but the standard library is needed.

``apt-get install chromium chromium-driver`` (or Chrome and chromedriver on PATH) makes it available.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Self

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = None if DRIVER and BROWSER else "needs chromium and chromedriver on PATH (Debian: chromium, chromium-driver)"
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage",
]  # fmt: skip


class Browser:
    """One window. A context manager."""

    def __init__(self, width: int = 1300, height: int = 1000) -> None:
        assert DRIVER is not None
        assert BROWSER is not None
        self._profile = tempfile.mkdtemp(prefix="browser-")
        self._driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._driver.stdout is not None
        try:
            for line in self._driver.stdout:
                if found := re.search(r"started successfully on port (\d+)", line):
                    break
            else:
                raise RuntimeError("chromedriver did not start")
            self._base = f"http://127.0.0.1:{found[1]}/session"
            arguments = [*_FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
            wanted = {
                "goog:chromeOptions": {"binary": BROWSER, "args": arguments},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            session = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
            self._base += "/" + session["sessionId"]
        except BaseException:
            self._stop()
            raise

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self._base + path,
            method=method,
            data=json.dumps(body if body is not None else {}).encode() if method == "POST" else None,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self._call("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that ``script`` returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def move(self, x: float, y: float, *, click: bool = False) -> None:
        """The mouse to a place in the window, and maybe a click there."""
        actions = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        if click:
            actions += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})

    def keys(self, text: str) -> None:
        """Keys to whatever has the focus. Special keys by their WebDriver code points."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def complaints(self) -> list[str]:
        """Console messages of warning level and above, since the last call."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, target: Path, *, whole: bool = False) -> None:
        if whole:
            shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        else:
            shot = self._call("GET", "/screenshot")
        target.write_bytes(base64.b64decode(shot))

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.wait(10)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._stop()
