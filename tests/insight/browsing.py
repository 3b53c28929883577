"""A browser that is driven over its own pipe, as a person drives it with a keyboard; no library is needed for it."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--mute-audio",
    "--disable-background-networking", "--disable-sync", "--disable-component-update", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip
AS_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 20) for number in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that becomes the browser, once the pipes have the numbers at which it looks for them."""
KEYS = {"Tab": 9, "Enter": 13, "Space": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}


class Browser:
    """A headless Chromium. It is spoken to in JSON between zero bytes, on two pipes that it inherits."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        launcher = [sys.executable, "-c", AS_3_AND_4, str(theirs_in), str(theirs_out), *command]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(launcher, pass_fds=(theirs_in, theirs_out), stdout=quiet, stderr=quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        pages = self("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask for something and return the answer; events that come before it are kept."""
        self._number += 1
        said: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            said["sessionId"] = self._session
        os.write(self._out, json.dumps(said).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path, width: int, is_dark: bool = False) -> None:
        """Show a file in a window of this width."""
        self.events.clear()
        self("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        scheme = "dark" if is_dark else "light"
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next(deadline - time.monotonic()))

    def ask(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key and let it go, as a keyboard does."""
        name = " " if key == "Space" else key
        typed = {"Enter": "\r", "Space": " "}.get(key, "")
        said = {"key": name, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        down = {"type": "keyDown", "text": typed} if typed else {"type": "rawKeyDown"}
        self("Input.dispatchKeyEvent", **down, **said)
        self("Input.dispatchKeyEvent", type="keyUp", **said)

    def picture(self, is_whole: bool = True) -> str:
        """Return a picture of the page, PNG in base 64."""
        return str(self("Page.captureScreenshot", captureBeyondViewport=is_whole)["data"])

    @property
    def troubles(self) -> list[str]:
        """What the page complained of since it was opened: exceptions, errors on the console, refused requests."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled", "Network.loadingFailed")
        return [json.dumps(event)[:400] for event in self.events if event.get("method") in kinds]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page asked for since it was opened."""
        asked = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [str(event["params"]["request"]["url"]) for event in asked]

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(30)
        os.close(self._out)
        os.close(self._in)

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, seconds))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._read += chunk
        line, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer
