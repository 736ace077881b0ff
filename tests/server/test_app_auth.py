"""Keys, Host names, origins: everything is closed but what is listed."""

from __future__ import annotations

import logging
import socket

import pytest

from octavo.errors import ConfigError
from octavo.server.auth import Keys, read_keys
from octavo.server.origins import accepted_hosts, host_name, is_loopback
from octavo.server_config import ServerConfig
from tests.server.fake_server import chat, fake_server

KEYS = ("sesame-one", "sesame-two")
OPEN = {"/", "/health", "/ready", "/version"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest.fixture(scope="module")
def server():
    with fake_server(api_key=KEYS, allowed_origins=("https://app.example",)) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def routes_of(app) -> set[str]:
    """Every path the application has, taken from its routes, through whatever holds them."""
    found, todo = set(), list(app.routes)
    while todo:
        route = todo.pop()
        if hasattr(route, "path"):
            found.add(route.path)
        for name in ("routes", "original_router"):
            inner = getattr(route, name, None)
            todo += getattr(inner, "routes", inner) or []
    return found


def test_every_route_needs_a_key(server):
    paths = routes_of(server.app)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/openapi.json", *OPEN} <= paths
    paths = {path.replace("{model_id:path}", "org/fake").replace("{model_id}", "org/fake") for path in paths}
    with server.client() as client:
        for path in sorted(paths):
            for method in METHODS:
                is_open = path in OPEN and method in ("GET", "HEAD")
                nobody, wrong = client.request(method, path), client.request(method, path, headers=bearer("sesame"))
                assert (nobody.status_code == 401) is not is_open, (method, path)
                assert (wrong.status_code == 401) is not is_open, (method, path)
                if is_open:
                    assert nobody.status_code == 200
                elif method != "HEAD":
                    assert nobody.json()["error"]["code"] == "invalid_api_key" and nobody.headers["www-authenticate"] == "Bearer"
                for key in KEYS:
                    assert client.request(method, path, headers=bearer(key)).status_code != 401, (method, path)


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1/../v1/models", "/V1/models", "/v1/models/", "/health/../metrics", "/health/", "//health", "/HEALTH", "/metrics/",
     "/%76ersion/x", "/version%2f", "/version;x", "/docs", "/redoc", "/favicon.ico", "/nope", "/v1/engines", "*"],
)  # fmt: skip
def test_other_spellings_need_a_key(server, path):
    for method in ("GET", "HEAD", "POST", "OPTIONS"):
        with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert answer.startswith(b"HTTP/1.1 401 ") or (path == "*" and answer.startswith(b"HTTP/1.1 400 ")), (method, path, answer[:80])


def test_only_one_bearer_header_counts(server):
    with server.client() as client:
        for value in (
            "sesame-one",
            "Basic sesame-one",
            "Bearer",
            "Bearer x",
            "Bearer sesame-one sesame-one",
            "Bearer sesame-on",
            "Bearer SESAME-ONE",
        ):
            assert client.get("/v1/models", headers={"authorization": value}).status_code == 401, value
        twice = [("authorization", "Bearer wrong"), ("authorization", "Bearer sesame-one")]
        assert client.get("/v1/models", headers=twice).status_code == 401
        assert client.get("/v1/models?api_key=sesame-one", headers={"x-api-key": "sesame-one"}).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "bearer sesame-one"}).status_code == 200


def test_requests_without_a_key_go_no_further(server):
    before = len(server.inputs.seen)
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=chat()).status_code == 401
        assert len(server.inputs.seen) == before
        scopes = []
        for key in (*KEYS, KEYS[0]):
            assert client.post("/v1/chat/completions", json=chat(max_tokens=1), headers=bearer(key)).status_code == 200
            scopes.append(server.inputs.seen[-1].key_scope)
    assert scopes[0] == scopes[2] != scopes[1] and None not in scopes
    assert not any(key in scope for key in KEYS for scope in scopes)


def test_keys_are_all_compared(monkeypatch):
    """No early end, neither at the first match nor at the first difference."""
    compared = []
    monkeypatch.setattr("octavo.server.auth.hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    keys = Keys(["a", "b" * 100, "c"])
    for header in (b"Bearer a", b"Bearer c", b"Bearer x", b"", b"Basic a"):
        compared.clear()
        keys.scope_of(header)
        assert compared == [(32, 32)] * 3
    assert not any(key in repr(vars(keys)) for key in ("'a'", "bbbb"))


def test_key_files(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("# two of them\n\n first \nsecond\n")
    file.chmod(0o600)
    with caplog.at_level(logging.WARNING, "octavo.server"):
        assert read_keys(ServerConfig(api_key=("zero",), api_key_file=str(file))) == ["zero", "first", "second"]
        assert not caplog.text
        file.chmod(0o644)
        read_keys(ServerConfig(api_key_file=str(file)))
        assert "chmod 600" in caplog.text and "first" not in caplog.text
    for content in (b"", b"# none\n", b"\xff\xfe", b"a b\n", b"x" * 100_000):
        file.write_bytes(content)
        with pytest.raises(ConfigError) as raised:
            read_keys(ServerConfig(api_key_file=str(file)))
        assert "xxx" not in str(raised.value)
    with pytest.raises(ConfigError):
        read_keys(ServerConfig(api_key_file=str(tmp_path / "missing")))


def test_host_header(server):
    with server.client() as client:
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]", "[::1]:8000", "localhost."):
            assert client.get("/health", headers={"host": host}).status_code == 200, host
        for host in (
            "evil.example",
            "evil.example:8000",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "[::2]",
            "",
            "localhost@evil.example",
        ):
            reply = client.get("/health", headers={"host": host})
            assert reply.status_code == 403 and reply.json()["error"]["code"] == "host_not_allowed", host


def test_which_hosts():
    assert accepted_hosts("0.0.0.0", ()) is None
    assert accepted_hosts("0.0.0.0", ("My.Example:80",)) == {"my.example"}
    assert "my.example" in accepted_hosts("127.0.0.1", ("my.example",)) and "localhost" in accepted_hosts("127.0.0.1", ())
    assert "127.0.0.7" in accepted_hosts("127.0.0.7", ()) and "[::1]" in accepted_hosts("::1", ())
    assert host_name("[::1]:80") == "[::1]" and host_name("A.b:1") == "a.b"
    assert is_loopback("localhost") and is_loopback("::1") and is_loopback("127.9.9.9")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")


def test_no_cors_unless_listed(server):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with server.client() as client:
        for origin in ("https://evil.example", "null", "https://app.example.evil", "http://app.example", "https://app.example:1"):
            for reply in (
                client.options("/v1/chat/completions", headers={"origin": origin} | ask),
                client.get("/health", headers={"origin": origin}),
            ):
                assert not [name for name in reply.headers if name.startswith("access-control")], origin
        origin = {"origin": "https://app.example"}
        preflight = client.options("/v1/chat/completions", headers=origin | ask)
        assert preflight.status_code == 204 and "authorization" in preflight.headers["access-control-allow-headers"]
        for reply in (preflight, client.get("/health", headers=origin), client.get("/v1/models", headers=origin)):
            assert reply.headers["access-control-allow-origin"] == "https://app.example" and reply.headers["vary"] == "Origin"
            assert "access-control-allow-credentials" not in reply.headers and reply.headers["x-request-id"]
        assert client.get("/v1/models", headers=origin).status_code == 401
        assert client.options("/v1/chat/completions", headers=origin).status_code == 401  # no preflight


def test_without_a_key_everything_is_open():
    with fake_server() as server, server.client() as client:
        assert client.get("/v1/models").status_code == 200
        client.post("/v1/chat/completions", json=chat(max_tokens=1))
        assert server.inputs.seen[-1].key_scope is None
