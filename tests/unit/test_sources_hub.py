"""The Hugging Face path, through the real client library, against a hub of our own on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"

#: Runs in a process of its own: the library reads its environment once, when imported.
PROGRAM = """
import json, sys
from octavo.errors import ModelLoadError
from octavo.loading.source import resolve_source
for model, options in json.loads(sys.argv[1]):
    seen = []
    if options.pop("progress", False):
        options["progress"] = lambda done, total: seen.append((done, total))
    try:
        files = resolve_source(model, **options)
        out = {"name": files.name, "folder": str(files.paths[0].parent), "layers": files.config.num_layers, "seen": seen[-1:]}
    except ModelLoadError as error:
        out = {"error": str(error)}
    print(json.dumps(out))
"""


class FakeHub(ThreadingHTTPServer):
    """Repositories by id: a folder of files, or the refusal the real hub would give."""

    def __init__(self, repos: dict[str, Path | tuple[int, str]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = repos
        self.requests: list[tuple[str, str, str | None]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path, self.headers.get("Authorization")))
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            parts = parts[2:]
        repo, kind, revision, *rest = "/".join(parts[:2]), parts[2], parts[3], *parts[4:]
        found = self.server.repos.get(repo, (401, "RepoNotFound"))
        if isinstance(found, tuple):
            return self.reply(found[0], b"{}", {"X-Error-Code": found[1]})
        if revision not in ("main", COMMIT):
            return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if kind == "resolve":
            data = (found / "/".join(rest)).read_bytes()
            return self.reply(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        files = [p for p in sorted(found.rglob("*")) if p.is_file()]
        if kind == "revision":
            siblings = [{"rfilename": str(p.relative_to(found))} for p in files]
            return self.reply(200, json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode())
        tree = [
            {"type": "file", "path": str(p.relative_to(found)), "size": p.stat().st_size, "oid": hashlib.sha1(p.read_bytes()).hexdigest()}
            for p in files
        ]
        return self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET


def run(endpoint: str, home: Path, *calls: tuple[str, dict], **env: str) -> list[dict]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    paths = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(calls)],
        env={**clean, **settings, "PYTHONPATH": paths, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(calls)
    for result in results:
        assert "\n" not in result.get("error", "")
    assert "Traceback" not in done.stderr
    return results


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A hub with a few repositories, and the cache after one online run of PROGRAM against it."""
    root = tmp_path_factory.mktemp("hub")
    good = write_tiny(root / "good", num_hidden_layers=3, shards=2).path
    (good / "pytorch_model.bin").write_bytes(b"never fetched")
    (good / "model.gguf").write_bytes(b"never fetched")
    (good / "onnx").mkdir()
    (good / "onnx" / "config.json").write_text("never fetched")
    strange = write_tiny(root / "strange").path
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    pickled = write_tiny(root / "pickled").path
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    bare = root / "bare"
    bare.mkdir()
    (bare / "model.gguf").write_bytes(b"x")
    server = FakeHub(
        {
            "org/good": good, "org/strange": strange, "org/pickled": pickled, "org/bare": bare, "org/gated": (403, "GatedRepo"),
            "org/broken": (500, "oops"),
        }
    )  # fmt: skip
    endpoint, home = f"http://127.0.0.1:{server.server_address[1]}", root / "home"
    names = ["good", "gated", "none", "strange", "pickled", "bare", "broken"]
    calls = [(f"org/{name}", {"progress": True, "token": "secret"} if name == "good" else {}) for name in names]
    results = run(endpoint, home, *calls, ("org/good", {"revision": "v9"}))
    seen = list(server.requests)
    yield {
        "results": dict(zip([*names, "revision"], results, strict=True)),
        "requests": seen,
        "server": server,
        "endpoint": endpoint,
        "home": home,
        "good": good,
    }
    server.shutdown()


def test_a_model_is_fetched_into_the_cache(world):
    good = world["results"]["good"]
    folder = Path(good["folder"])
    assert good["name"] == "org/good" and good["layers"] == 3
    assert world["home"] in folder.parents and folder.name == COMMIT
    names = {p.name for p in world["good"].iterdir() if p.suffix in (".json", ".safetensors")}
    assert {p.name for p in folder.iterdir()} == names
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == (world["good"] / "model-00001-of-00002.safetensors").read_bytes()
    done, total = good["seen"][0]
    assert done == total >= sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def test_only_what_is_needed_is_fetched_and_the_token_is_sent(world):
    fetched = [path for method, path, _ in world["requests"] if method == "GET" and "/resolve/" in path]
    assert fetched and not [p for p in fetched if p.endswith((".bin", ".gguf")) or "/onnx/" in p]
    tokens = {token for _, path, token in world["requests"] if "org/good" in path and "v9" not in path}
    assert tokens == {"Bearer secret"}
    assert {token for _, path, token in world["requests"] if "org/strange" in path} == {None}


def test_a_model_that_cannot_run_is_refused_before_its_weights_are_fetched(world):
    assert "'mamba' is not supported" in world["results"]["strange"]["error"]
    assert not [path for _, path, _ in world["requests"] if "org/strange" in path and "safetensors" in path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated", "org/gated: is gated; accept its terms at https://huggingface.co/org/gated and set HF_TOKEN"),
        ("none", "org/none: not found on the Hugging Face Hub (if it is private, set HF_TOKEN)"),
        ("revision", "org/good: has no revision 'v9'"),
        ("bare", "org/bare: has no config.json"),
        ("pickled", "org/pickled: has no safetensors weights (pickled ones are refused; a GGUF is given as a file)"),
        ("broken", "org/broken: not (completely) in the local cache, and the Hugging Face Hub cannot be reached"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(world, name, message):
    assert message in world["results"][name]["error"]


def test_offline_uses_the_cache_and_says_so_where_it_is_empty(world):
    before = len(world["server"].requests)
    for env, options in (({"HF_HUB_OFFLINE": "1"}, {}), ({}, {"offline": True})):
        good, other = run(world["endpoint"], world["home"], ("org/good", dict(options)), ("org/other", dict(options)), **env)
        assert good["layers"] == 3
        expected = "nothing was fetched: `octavo run org/other` does, unless HF_HUB_OFFLINE is set"
        assert other["error"] == f"org/other: not (completely) in the local cache, and {expected}"
    assert len(world["server"].requests) == before


def test_an_unreachable_hub(world):
    good, other = run("http://127.0.0.1:9", world["home"], ("org/good", {}), ("org/other", {}))
    assert good["layers"] == 3  # from the cache
    assert "the Hugging Face Hub cannot be reached" in other["error"]


def test_an_incomplete_cache_is_not_used_offline(world, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(world["home"], home, symlinks=True)
    (home / "hub" / "models--org--good" / "snapshots" / COMMIT / "model-00002-of-00002.safetensors").unlink()
    (result,) = run(world["endpoint"], home, ("org/good", {"offline": True}))
    assert "not (completely) in the local cache" in result["error"]
