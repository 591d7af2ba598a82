"""A hub on this machine that serves one dataset, org/name, from a folder."""

import hashlib
import json
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class DatasetHub:
    """Every revision is the current commit."""

    def __init__(self, folder: Path, commit: str = "a" * 40) -> None:
        self.folder, self.commit = folder, commit
        self.files_sent: set[str] = set()
        self.torn_files: set[str] = set()  # the connection is cut in the middle of them
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Answer, self))
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def listing(self, path: str, body: bytes) -> Any:
        """What the API says of the dataset, of its files, or of named files."""
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        names = {file.relative_to(self.folder).as_posix(): file for file in files}
        entries = [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": oid(file)}
            for name, file in names.items()
        ]
        if re.fullmatch(r"/api/datasets/org/name(/revision/.*)?", path):
            siblings = [{"rfilename": name} for name in names]
            return {"id": "org/name", "sha": self.commit, "siblings": siblings, "private": False, "tags": []}
        if path.startswith("/api/datasets/org/name/paths-info/"):
            return [entry for entry in entries if entry["path"] in parse_qs(body.decode())["paths"]]
        return entries if re.fullmatch(r"/api/datasets/org/name/tree/[^/]*", path) else None


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: DatasetHub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if file := re.fullmatch(r"/datasets/org/name/resolve/[^/]*/(.*)", path):
            self._send_file(self.hub.folder / file[1])
            return
        content = self.hub.listing(path, body)
        if content is None:
            self._send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
        else:
            self._send(200, json.dumps(content).encode())

    def _send_file(self, file: Path) -> None:
        if not file.is_file():
            self._send(404, b"", **{"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.hub.files_sent.add(file.name)
            self.close_connection = file.name in self.hub.torn_files
        content, code = file.read_bytes(), 200
        headers = {"ETag": f'"{oid(file)}"', "X-Repo-Commit": self.hub.commit}
        if part := _RANGE.match(self.headers.get("Range", "")):
            first, last = int(part[1]), min(int(part[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, code = content[first : last + 1], 206
        self._send(code, content, **headers)

    def _send(self, code: int, content: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if self.close_connection else content)

    do_GET = do_POST = do_HEAD = answer  # noqa: N815


def oid(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:40]
