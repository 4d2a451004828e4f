"""A stand-in for the hub's HTTP API, as far as uploading a folder to a model's repo asks for it."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

TOKEN = "hf_right"
ME, TEAM = "me", "team"  # who the token is of, and their organization


@dataclass
class Hub:
    """What the stand-in has been sent, and how it is to behave."""

    branches: dict = field(default_factory=dict)  # {(repo, branch): {path: content}}
    large: dict = field(default_factory=dict)  # contents by their SHA-256
    requests: list = field(default_factory=list)  # such as "POST /api/repos/create"
    role: str = "write"  # of the token
    cuts: str | None = None  # requests with this in them lose their connection halfway
    address: str = ""


@dataclass
class Refusal(Exception):
    """An answer other than 200."""

    status: int
    message: str
    more: dict = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    """Answers a request from server.hub. Large files are those that end with .safetensors."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer()

    do_POST = do_PUT = do_GET

    def answer(self):
        hub, length = self.server.hub, int(self.headers.get("Content-Length", 0))
        hub.requests.append(f"{self.command} {self.path}")
        if hub.cuts is not None and hub.cuts in hub.requests[-1]:
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        content = self.rfile.read(length)
        status, result = 200, {}
        try:
            result = self.result(hub, content) or {}
        except Refusal as refusal:
            status, result = refusal.status, {"error": refusal.message} | refusal.more
        body = json.dumps(result).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("X-Error-Message", result["error"])
        self.end_headers()
        self.wfile.write(body)

    def result(self, hub, content):
        """What is answered, as an object; what is sent is kept."""
        path = unquote(self.path)
        if path.startswith("/large/"):  # its address is enough, as on the hub
            digest = path.rpartition("/")[2]
            assert hashlib.sha256(content).hexdigest() == digest
            hub.large[digest] = content
            return None
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, "Invalid credentials")
        if path == "/api/whoami-v2":
            token = {"accessToken": {"role": hub.role}}
            return {"name": ME, "orgs": [{"name": TEAM}], "auth": token}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        given = [json.loads(line) for line in content.splitlines()]
        if path == "/api/repos/create":
            return self.create(hub, **given[0])
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            return {"objects": [self.place(hub, **large) for large in given[0]["objects"]]}
        if match := re.fullmatch(r"/api/models/(.+?/.+?)/(branch|preupload|commit)/(.+)", path):
            repo, what, branch = match.groups()
            return getattr(self, what)(hub, (repo, branch), given)
        raise Refusal(404, f"there is no {path}")

    def create(self, hub, name, organization=None, **_):
        repo = f"{organization or ME}/{name}"
        if organization not in (None, ME, TEAM):
            raise Refusal(403, f"You don't have the rights to create a model under {organization}")
        url = {"url": f"{hub.address}/{repo}"}
        if (repo, "main") in hub.branches:
            raise Refusal(409, "it exists", url)
        hub.branches[repo, "main"] = {}
        return url

    def branch(self, hub, place, _):
        if place in hub.branches:
            raise Refusal(409, "it exists")
        hub.branches[place] = {}

    def preupload(self, hub, place, given):
        """How each file is to be sent."""
        modes = {True: "lfs", False: "regular"}
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": modes[file["path"].endswith(".safetensors")],
                    "shouldIgnore": False,
                }
                for file in given[0]["files"]
            ]
        }

    def place(self, hub, oid, size):
        """Where a large file is to be sent."""
        upload = {"href": f"{hub.address}/large/{oid}", "header": {}}
        return {"oid": oid, "size": size, "actions": {"upload": upload}}

    def commit(self, hub, place, given):
        files = dict(hub.branches[place])
        for line in given:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.large[value["oid"]]
        hub.branches[place] = files
        return {"commitUrl": f"{hub.address}/{place[0]}/commit/1", "commitOid": "1"}


@contextlib.contextmanager
def running_hub():
    """A Hub that answers at its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(address=f"http://127.0.0.1:{server.server_address[1]}")
        server.hub, server.daemon_threads = hub, True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield hub
        server.shutdown()
