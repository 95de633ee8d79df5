"""A small Hugging Face Hub on 127.0.0.1, held in memory, for the real `huggingface_hub` client.

It speaks the part of the Hub's HTTP interface that downloading a snapshot and uploading a folder
need: repositories with commits, branches and tags; files kept in git and large files behind a
redirect (LFS); tokens with and without write permission; the Hub's error codes. `cut`, `status` and
`pages` make it misbehave for one file or address.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
import transformers.utils.hub
from huggingface_hub import constants

WRITER, READER = "hf_loopback_writer", "hf_loopback_reader"
"""The two tokens this Hub knows."""

_SHA = re.compile(r"[0-9a-f]{40}")


class Problem(Exception):
    """An HTTP error answer, with the Hub's error code."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {
            "X-Error-Message": message,
            **({"X-Error-Code": code} if code else {}),
            **headers,
        }


@dataclass
class Repository:
    """One repository. Names of dataset repositories start with ``datasets/``, like their URLs."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    """Branches and tags."""
    messages: dict[str, str] = field(default_factory=dict)


def files_of(folder: Path) -> dict[str, bytes]:
    """A folder's content as a commit: path -> bytes."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


class HubServer:
    """The loopback Hub. Use as a context manager; `stop` and `start` pull and plug the cable."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        """Uploaded LFS objects, sha256 -> bytes."""
        self.log: list[tuple[str, str]] = []
        """(method, path) of every request."""
        self.ranges: list[tuple[str, str]] = []
        """(file name, Range header) of every download that asked for a part."""
        self.cut: dict[str, list[int]] = {}
        """File name -> for each of its next GETs, the bytes sent before the connection breaks."""
        self.status: dict[str, int] = {}
        """Start of a path -> status to answer with."""
        self.pages: dict[str, bytes] = {}
        """Start of a path -> HTML to answer with, as a login page in a guest network does."""
        self.shorten: dict[str, int] = {}
        """File name -> bytes missing at the end of a download whose headers announce them."""
        self.lfs_suffixes: tuple[str, ...] = (".safetensors",)
        self.lock = threading.Lock()
        self._ports = [0, 0]
        self._servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(self) -> None:
        """Serve the Hub and the store of large files, to which no token may be sent."""
        handler = type("Handler", (_Handler,), {"hub": self})
        for number, port in enumerate(self._ports):
            server = ThreadingHTTPServer(("127.0.0.1", port), handler)
            server.daemon_threads = True
            self._ports[number] = server.server_port
            thread = threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
            )
            thread.start()
            self._servers.append((server, thread))

    def stop(self) -> None:
        while self._servers:
            server, thread = self._servers.pop()
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> HubServer:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def store(self) -> str:
        return f"http://127.0.0.1:{self._ports[1]}"

    def commit(
        self,
        repo_id: str,
        files: Mapping[str, bytes],
        *,
        branch: str = "main",
        private: bool = False,
        message: str = "",
        sha: str | None = None,
    ) -> str:
        """Replace a branch's content; make repository and branch if missing. The commit's id."""
        repository = self.repositories.setdefault(repo_id, Repository(private=private))
        parent = repository.refs.get(branch, "")
        content = [(path, hashlib.sha256(data).hexdigest()) for path, data in sorted(files.items())]
        sha = (
            sha
            or hashlib.sha1(
                repr((repo_id, parent, len(repository.commits), content)).encode()
            ).hexdigest()
        )
        repository.commits[sha] = dict(files)
        repository.refs[branch] = sha
        repository.messages[sha] = message
        return sha

    def tag(self, repo_id: str, name: str, sha: str) -> None:
        self.repositories[repo_id].refs[name] = sha

    def downloads(self, name: str) -> int:
        """How many GETs of this file were answered with content."""
        return sum(method == "GET" and path.endswith(f"/{name}") for method, path in self.log)


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: one request a connection, so that `HubServer.stop` leaves no connection alive."""

    hub: HubServer

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        self.body = self._read_body()
        path = urlsplit(self.path).path
        with self.hub.lock:
            self.hub.log.append((method, unquote(path)))
            try:
                for start, status in self.hub.status.items():
                    if path.startswith(start):
                        raise Problem(status, "", "This Hub has a bad day")
                for start, page in self.hub.pages.items():
                    if path.startswith(start):
                        return self._send(200, page, {"Content-Type": "text/html"})
                self._route(method, path)
            except Problem as problem:
                self._json({"error": problem.message}, problem.status, problem.headers)

    def _read_body(self) -> bytes:
        """The client sends uploads in chunks, which http.server leaves to us."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _route(self, method: str, path: str) -> None:
        repo = r"(?P<repo>(datasets/)?[^/]+/[^/]+)"
        api = rf"/api/(models/|(?=datasets/)){repo}"
        routes = {
            "GET": {
                rf"{api}(/revision/(?P<rev>[^/]+))?": self._info,
                rf"{api}/tree/(?P<rev>[^/]+)(/(?P<under>.+))?": self._tree,
                rf"/{repo}/resolve/(?P<rev>[^/]+)/(?P<file>.+)": self._resolve,
                rf"/store/{repo}/(?P<sha>[^/]+)/(?P<file>.+)": self._stored,
            },
            "POST": {
                r"/api/repos/create": self._create,
                r"/api/validate-yaml": self._validate_card,
                rf"{api}/branch/(?P<branch>[^/]+)": self._branch,
                rf"{api}/preupload/(?P<rev>[^/]+)": self._preupload,
                rf"/{repo}\.git/info/lfs/objects/batch": self._lfs_batch,
                rf"{api}/commit/(?P<rev>[^/]+)": self._commit,
            },
            "PUT": {r"/lfs/(?P<oid>[0-9a-f]{64})": self._lfs_put},
        }
        for pattern, handle in routes["GET" if method == "HEAD" else method].items():
            if actual := re.fullmatch(pattern, path):
                return handle(**{k: unquote(v) if v else v for k, v in actual.groupdict().items()})
        raise Problem(404, "", f"No such address: {path}")

    # Answers

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], announced: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(
        self, content: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self._send(
            status,
            json.dumps(content).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )

    # Permissions and look-ups

    @property
    def _token(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if token not in (None, WRITER, READER):
            raise Problem(401, "", "Invalid credentials in Authorization header")
        return token

    def _may_write(self) -> None:
        if self._token is None:
            raise Problem(401, "", "Invalid username or password.")
        if self._token != WRITER:
            raise Problem(403, "", "This token has no write permission")

    def _repository(self, repo: str) -> Repository:
        actual = self.hub.repositories.get(repo)
        if actual is None or (actual.private and self._token is None):
            raise Problem(404 if self._token else 401, "RepoNotFound", "Repository not found")
        return actual

    def _revision(self, repo: str, rev: str | None) -> tuple[str, dict[str, bytes]]:
        repository = self._repository(repo)
        sha = rev if rev in repository.commits else repository.refs.get(rev or "main")
        if sha is None:
            raise Problem(404, "RevisionNotFound", f"Invalid rev id: {rev}")
        return sha, repository.commits[sha]

    def _is_large(self, file: str) -> bool:
        return file.endswith(self.hub.lfs_suffixes)

    # Downloading

    def _info(self, repo: str, rev: str | None) -> None:
        sha, files = self._revision(repo, rev)
        private = self.hub.repositories[repo].private
        siblings = [{"rfilename": file} for file in files]
        self._json(
            {
                "id": repo.removeprefix("datasets/"),
                "sha": sha,
                "private": private,
                "tags": [],
                "siblings": siblings,
            }
        )

    def _tree(self, repo: str, rev: str, under: str | None) -> None:
        sha, files = self._revision(repo, rev)
        start = f"{under}/" if under else ""
        inside = {file: data for file, data in files.items() if file.startswith(start)}
        folders = sorted(
            {str(p) for file in inside for p in PurePosixPath(file).parents} - {".", under}
        )
        entries = [
            {"type": "directory", "path": p, "oid": _git_oid(p.encode())}
            for p in folders
            if p.startswith(start)
        ]
        for file, data in inside.items():
            entry = {"type": "file", "path": file, "size": len(data), "oid": _git_oid(data)}
            if self._is_large(file):
                entry["lfs"] = {
                    "oid": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 130,
                }
            entries.append(entry)
        if under and not entries:
            raise Problem(404, "EntryNotFound", f"{under} does not exist on {sha}")
        if "recursive=true" not in self.path.lower():
            entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(start)]
        self._json(entries)

    def _file(self, repo: str, rev: str, file: str) -> tuple[str, bytes]:
        sha, files = self._revision(repo, rev)
        if file not in files:
            raise Problem(
                404, "EntryNotFound", f"{file} does not exist on {sha}", **{"X-Repo-Commit": sha}
            )
        return sha, files[file]

    def _resolve(self, repo: str, rev: str, file: str) -> None:
        sha, data = self._file(repo, rev, file)
        if not self._is_large(file):
            return self._content(file, data, {"ETag": f'"{_git_oid(data)}"', "X-Repo-Commit": sha})
        headers = {
            "X-Repo-Commit": sha,
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"{self.hub.store}/store/{repo}/{sha}/{file}",
        }
        self._send(302, b"", headers)

    def _stored(self, repo: str, sha: str, file: str) -> None:
        """The address is the permission, so a client that sends its token here gives it away."""
        if self.headers.get("Authorization"):
            raise Problem(400, "", "The store wants no token")
        data = self.hub.repositories[repo].commits[sha][file]
        self._content(file, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'})

    def _content(self, file: str, data: bytes, headers: dict[str, str]) -> None:
        """A file's bytes from where the client wants to go on, or fewer of them than announced."""
        name = file.rsplit("/", 1)[-1]
        start = 0
        if "Range" in self.headers:
            self.hub.ranges.append((name, self.headers["Range"]))
            start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        rest = data[start:]
        headers |= {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        status = 206 if start else 200
        if self.command == "GET" and self.hub.cut.get(name):
            return self._send(
                status, rest[: self.hub.cut[name].pop(0)], headers, announced=len(rest)
            )
        if self.command == "GET" and name in self.hub.shorten:
            rest = rest[: -self.hub.shorten[name]]
        self._send(status, rest, headers)

    # Uploading

    def _create(self) -> None:
        self._may_write()
        wanted = json.loads(self.body)
        repo = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{repo}"}
        if repo in self.hub.repositories:
            return self._json({**url, "error": "You already created this model repo"}, 409)
        visibility = wanted.get("visibility") or ("private" if wanted.get("private") else "public")
        self.hub.repositories[repo] = Repository(private=visibility == "private")
        self.hub.commit(
            repo, {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
        )
        self._json(url)

    def _validate_card(self) -> None:
        """Parse the model card's front matter, and reject a base_model that is not a Hub id."""
        card = json.loads(self.body)["content"]
        actual = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
        if not actual:
            return self._json(
                {"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]}
            )
        base = re.search(r"^base_model: *(.*)$", actual[1], re.MULTILINE)
        if base and not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", base[1]):
            message = f'"base_model" with value "{base[1]}" is not valid. Use a model id.'
            return self._json({"errors": [{"message": message}], "warnings": []}, 400)
        self._json({"errors": [], "warnings": []})

    def _branch(self, repo: str, branch: str) -> None:
        self._may_write()
        start, _ = self._revision(repo, json.loads(self.body or b"{}").get("startingPoint"))
        if branch in self.hub.repositories[repo].refs:
            raise Problem(409, "", f"Reference already exists: {branch}")
        self.hub.repositories[repo].refs[branch] = start
        self._json({}, 201)

    def _preupload(self, repo: str, rev: str) -> None:
        self._may_write()
        _, files = self._revision(repo, rev)
        answers = []
        for wanted in json.loads(self.body)["files"]:
            large = self._is_large(wanted["path"])
            answer = {
                "path": wanted["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
            }
            if (data := files.get(wanted["path"])) is not None:
                answer["oid"] = hashlib.sha256(data).hexdigest() if large else _git_oid(data)
            answers.append(answer)
        self._json({"files": answers})

    def _lfs_batch(self, repo: str) -> None:
        self._may_write()
        self._repository(repo)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.large:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def _lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Problem(400, "", "The content does not have the sha256 it was announced with")
        self.hub.large[oid] = self.body
        self._send(200, b"", {"ETag": f'"{oid}"'})

    def _commit(self, repo: str, rev: str) -> None:
        self._may_write()
        if rev not in self._repository(repo).refs or _SHA.fullmatch(rev):
            raise Problem(404, "RevisionNotFound", f"Invalid rev id: {rev}")
        _, files = self._revision(repo, rev)
        changed, message = dict(files), ""
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changed[value["path"]] = self.hub.large[value["oid"]]
            else:
                raise Problem(400, "", f"Unknown operation {line['key']}")
        sha = self.hub.commit(repo, changed, branch=rev, message=message)
        self._json({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def connected(hub: HubServer, home: Path) -> Iterator[None]:
    """Point this process's Hub client at the loopback server, logged out, with nothing cached.

    The client reads its environment once, at import, so what it made of it is replaced.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        huggingface_hub.close_session()  # an open one has read the proxies already
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "AGENT_HARNESSES_PATH", str(home / "registry.json"), raising=False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # large files by plain LFS
        yield
