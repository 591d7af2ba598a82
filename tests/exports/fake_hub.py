"""A hub on this machine, as far as `huggingface_hub` asks one that is pushed to."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """One user, and any number of repositories of which the last one has files."""

    def __init__(self) -> None:
        self.role, self.known = "write", True  # the user's token
        self.orgs: dict[str, str] = {}
        self.private: dict[str, bool] = {}  # the repositories
        self.public = False  # what it says of one that it knows
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}  # large files, by their sha256
        self.tokens: set[str] = set()
        self.broken: dict[str, bytes] = {}  # bodies that it answers by path, in place of its own
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.tokens.add((self.headers.get("authorization") or "").removeprefix("Bearer "))
                path = self.path.partition("?")[0]
                code, content = hub.answer(self.command, path, body)
                text = hub.broken.get(path, json.dumps(content).encode())
                code = 200 if path in hub.broken else code
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                if code == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = answer  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/whoami-v2":
            return self._user()
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.private.setdefault(name, asked.get("private") or asked.get("visibility") == "private")
            return 200, {"url": f"{self.address}/{name}", "id": name, "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._place(each) for each in json.loads(body)["objects"]]}
        if path.startswith("/put/"):
            self.stored[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        return self._of_repository(method, path, body)

    def _user(self) -> tuple[int, Any]:
        if not self.known:
            return 401, {"error": "Invalid user token."}
        orgs = [{"name": name, "roleInOrg": role} for name, role in self.orgs.items()]
        return 200, {"name": "me", "type": "user", "orgs": orgs, "auth": {"accessToken": {"role": self.role}}}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Where a large file goes; nowhere if it is there."""
        if wanted["oid"] in self.stored:
            return wanted
        return {**wanted, "actions": {"upload": {"href": f"{self.address}/put/{wanted['oid']}", "header": {}}}}

    def _of_repository(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if "/preupload/" in path:
            large = (".safetensors", ".gguf")
            told = [
                {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(large) else "regular"}
                for each in json.loads(body)["files"]
            ]
            return 200, {"files": [{**each, "shouldIgnore": False, "oid": None} for each in told]}
        if "/commit/" in path:
            self._commit([json.loads(line) for line in body.splitlines()])
            return 200, {"commitUrl": f"{self.address}/me/mine/commit/abc", "commitOid": "a" * 40, "success": True}
        if method == "GET" and path.startswith("/api/models/") and (self.private or self.files):
            files = [{"rfilename": name} for name in (".gitattributes", *self.files)]
            if "/tree/" in path:
                names = (".gitattributes", *self.files)
                return 200, [{"type": "file", "path": name, "oid": "a" * 40, "size": 1} for name in names]
            return 200, {"id": "me/mine", "sha": "a" * 40, "siblings": files, "private": not self.public, "tags": []}
        return 404, {"error": "Repository not found"}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]
