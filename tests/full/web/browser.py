"""Chromium, driven through its debugging pipe: pages as a person opens and clicks them."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Browser:
    """A page. `asked` are the addresses that it has asked for."""

    def __init__(self, folder: Path) -> None:
        (theirs, self._to), (self._from, back) = os.pipe(), os.pipe()
        script = f'exec chromium "$@" 3<&{theirs} 4>&{back}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(theirs, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(back)
        self._read, self._number, self._session = b"", 0, ""
        self.asked: list[str] = []
        target = self._do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._do("Network.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, address: str) -> None:
        self._do("Page.navigate", url=address)

    def value(self, script: str) -> Any:
        """What JavaScript gives in the page; None while it is being loaded."""
        answer = self._do("Runtime.evaluate", expression=script, returnByValue=True)
        return answer.get("result", {}).get("value")

    def _do(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        asked |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("method") == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
            if message.get("id") == self._number:
                return dict(message.get("result", {}))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            piece = os.read(self._from, 2**16)
            assert piece, "Chromium has ended"
            self._read += piece
        text, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(text))
