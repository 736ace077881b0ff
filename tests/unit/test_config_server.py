"""The engine's and the server's settings from one file: the shared namespace, lists, keys that are never shown, flags, documents."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.main import main
from octavo.cli.options import REPEATED, server_options
from octavo.config import EngineConfig
from octavo.config_sources import OTHER_VARIABLES, SETTINGS, load_config, load_settings, variable_name
from octavo.errors import ConfigError
from octavo.server_config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
BOTH = [ServerConfig, EngineConfig]
SECRET = "sk-0123456789-do-not-show"
NAMES = [field.name for cls in SETTINGS for field in dataclasses.fields(cls)]
LISTS = ["api_key", "served_model_name", "allowed_origins", "allowed_hosts"]

names = st.text("abcdefgh./:-", min_size=1, max_size=8)
VALUES = {
    "threads": st.integers(0, 64),
    "kv_cache_memory": st.sampled_from(["2GiB", "512MiB"]),
    "seed": st.none() | st.integers(0, 99),
    "host": st.sampled_from(["127.0.0.1", "::1"]),
    "port": st.integers(0, 65535),
    "api_key_file": st.none() | st.just("keys.txt"),
    "max_body": st.integers(1024, 2**31),
    "drain_timeout": st.floats(0.5, 100),
    "stream_interval": st.integers(1, 1000),
    **{name: st.lists(names, min_size=1, max_size=3) for name in LISTS},
}
some_settings = st.fixed_dictionaries({}, optional=VALUES)


def written(value):
    return ",".join(value) if isinstance(value, list) else "none" if value is None else str(value)


def expected(cls, values):
    own = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in own})


def test_no_two_settings_share_a_name():
    assert len(NAMES) == len(set(NAMES)) == len(dataclasses.fields(EngineConfig)) + len(dataclasses.fields(ServerConfig))
    assert not {variable_name(name) for name in NAMES} & OTHER_VARIABLES
    assert not {"config", "debug", "help"} & set(NAMES)  # flags of another kind


@given(file=some_settings, env=some_settings, flags=some_settings)
def test_one_file_one_environment_one_command_line(tmp_path_factory, file, env, flags):
    path = tmp_path_factory.getbasetemp() / "octavo.yaml"
    path.write_text(yaml.safe_dump(file))
    variables = {variable_name(name): written(value) for name, value in env.items()}
    given_flags = {name: tuple(value) if isinstance(value, list) else written(value) for name, value in flags.items()}
    server, engine = load_settings(path, variables, given_flags, BOTH)
    wanted = {**file, **env, **flags}
    assert server == expected(ServerConfig, wanted) and engine == expected(EngineConfig, wanted)
    # a command without the server reads the same file and environment
    assert load_config(path, variables, {}) == expected(EngineConfig, {**file, **env})


def test_settings_of_the_other_class_are_known_and_not_looked_at(tmp_path):
    path = tmp_path / "octavo.yaml"
    path.write_text("port: nonsense\nthreads: 3\napi_key: 7\n")
    assert load_config(path, {"OCTAVO_PORT": "tcp://10.0.0.1:80", "OCTAVO_API_KEY": ""}, {}).threads == 3
    for content, words in (
        ("prt: 1", "did you mean port?"),
        ("thread: 1", "did you mean threads?"),
        ("allowed_origin: x", "allowed_origins?"),
    ):
        path.write_text(content)
        for classes in (BOTH, [EngineConfig], [ServerConfig]):
            with pytest.raises(ConfigError, match="unknown setting") as caught:
                load_settings(path, {}, {}, classes)
            assert words in str(caught.value)
    with pytest.raises(ConfigError, match="OCTAVO_API_KEYS: unknown setting; did you mean OCTAVO_API_KEY?"):
        load_config(None, {"OCTAVO_API_KEYS": "x"}, {})
    with pytest.raises(ConfigError, match="--port: unknown setting"):
        load_config(None, {}, {"port": "1"})


@pytest.mark.parametrize(
    ("content", "value"),
    [("[a, b]", ("a", "b")), ("a", ("a",)), ("a, b", ("a", "b")), ("[]", ()), ("[' a ']", ("a",))],
)
def test_lists_in_a_file(tmp_path, content, value):
    (tmp_path / "o.yaml").write_text(f"allowed_hosts: {content}")
    assert load_settings(tmp_path / "o.yaml", {}, {}, [ServerConfig])[0].allowed_hosts == value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("allowed_origins: {a: 1}", "allowed_origins: must be a list of texts, got {'a': 1}"),
        ("allowed_origins: [1]", "must be a list of texts, got [1]; put it in quotes"),
        ("allowed_origins: 7", "must be a list of texts, got 7"),
        ("allowed_origins: [[a]]", "must be a list of texts"),
        ("allowed_origins: ['']", "must be a list of non-empty texts"),
        ("allowed_origins: ['a,b']", "must be a list with one entry each, got 'a,b'"),
        ("allowed_origins: ['*']", "allowed_origins: '*' would let any web page use this server"),
        ("port: 70000", "port: port must be an integer from 0 to 65535, got 70000"),
        ("port: '8000x'", "port: must be an integer, got '8000x'"),
        ("max_body: 12 parsecs", "not a memory size for max_body"),
        ("drain_timeout: 0", "must be a number of seconds above 0"),
        ("host: ''", "host must be text"),
        ("host: 127", "host: must be text, got 127; put it in quotes"),
    ],
)
def test_a_bad_server_setting_is_one_line_that_names_the_file(tmp_path, content, words):
    (tmp_path / "octavo.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path / "octavo.yaml", {}, {}, BOTH)
    message = str(caught.value)
    assert words in message and message.startswith(f"{tmp_path / 'octavo.yaml'}: ") and "\n" not in message


def test_a_service_named_octavo_in_kubernetes():
    variables = {"OCTAVO_SERVICE_HOST": "10.0.0.1", "OCTAVO_SERVICE_PORT": "80", "OCTAVO_PORT_80_TCP": "tcp://10.0.0.1:80"}
    assert load_settings(None, variables, {}, [ServerConfig]) == (ServerConfig(),)
    with pytest.raises(ConfigError, match="OCTAVO_PORT: must be an integer.*enableServiceLinks: false"):
        load_settings(None, variables | {"OCTAVO_PORT": "tcp://10.0.0.1:80"}, {}, [ServerConfig])


@pytest.mark.parametrize(
    "value", [[[SECRET]], {SECRET: 1}, [SECRET, 7], [SECRET, ""], 20260101, True, [SECRET, None], f"{SECRET}\ud800"], ids=range(8)
)
def test_an_error_about_a_key_does_not_show_it(tmp_path, value):
    path = tmp_path / "octavo.yaml"
    path.write_text(yaml.safe_dump({"api_key": value}))
    for file, flags in ((path, {}), (None, {"api_key": value})):
        try:
            (server,) = load_settings(file, {}, flags, [ServerConfig])
        except ConfigError as error:
            message = str(error)
            assert "api_key: " in message or message.startswith(("--api-key: ", f"{path}:"))
        else:
            message = repr(server)
        assert SECRET not in message and "20260101" not in message


def test_a_key_that_got_lost_does_not_open_the_server(tmp_path):
    for text in ("", " ", ",", " , "):
        with pytest.raises(ConfigError, match="^OCTAVO_API_KEY: "):
            load_settings(None, {"OCTAVO_API_KEY": text}, {}, BOTH)
    for flag in (("",), (" ",), ("a", "")):
        with pytest.raises(ConfigError, match="^--api-key: "):
            load_settings(None, {}, {"api_key": flag}, BOTH)
    (tmp_path / "o.yaml").write_text("api_key: ''")
    with pytest.raises(ConfigError, match="api_key: "):
        load_settings(tmp_path / "o.yaml", {}, {}, BOTH)
    assert load_settings(None, {"OCTAVO_API_KEY": "a, b"}, {}, [ServerConfig])[0].api_key == ("a", "b")


# -- flags ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def probe(monkeypatch, capsys):
    """Run a command made with server_options: (code, its settings, errors)."""
    seen = []

    @server_options
    def command(config: EngineConfig, server: ServerConfig) -> int:
        """Show what arrives."""
        seen.append((config, server))
        return 0

    monkeypatch.setitem(sys.modules, "octavo.cli.models", types.SimpleNamespace(command=command, EXAMPLES="Examples:"))
    for name in NAMES:
        monkeypatch.delenv(variable_name(name), raising=False)

    def run(*arguments):
        seen.clear()
        code = main(["models", *arguments])
        captured = capsys.readouterr()
        return code, seen[0] if seen else captured.out, captured.err

    return run


def test_flags_of_both_classes(probe, tmp_path, monkeypatch):
    (tmp_path / "octavo.yaml").write_text("threads: 3\nport: 1\nallowed_hosts: [a, b]\n")
    monkeypatch.setenv("OCTAVO_PORT", "2")
    code, (config, server), _ = probe("--config", str(tmp_path / "octavo.yaml"), "--max-num-seqs", "5", "--allowed-origins", "https://x")
    assert code == 0 and (config.threads, config.max_num_seqs) == (3, 5)
    assert (server.port, server.allowed_hosts, server.allowed_origins) == (2, ("a", "b"), ("https://x",))
    _, (_, server), _ = probe("--port", "3", "--api-key", "one,two", "--api-key", "three", "--allowed-hosts", "c")
    assert (server.port, server.api_key, server.allowed_hosts) == (3, ("one,two", "three"), ("c",))  # a flag is one item
    code, shown, err = probe("--api-key", SECRET, "--api-key", "")
    assert code == 2 and err.startswith("octavo: --api-key: ") and SECRET not in err + shown


def test_every_setting_is_a_flag_with_help(probe):
    code, text, _ = probe("--help")
    assert code == 0
    for name in NAMES:
        assert f"\n  --{name.replace('_', '-')} " in text
    assert text.count("(may be") == len(LISTS) and set(LISTS) < REPEATED


# -- documents -----------------------------------------------------------------------------------------------------
def test_the_document_is_what_the_dataclasses_say():
    spec = importlib.util.spec_from_file_location("settings_tool", ROOT / "tools" / "settings.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.DOCUMENT.read_text("utf-8")
    assert tool.document(text) == text
    assert all(f"| `{name}` |" in text for name in NAMES)


def test_the_example_file_can_be_used_as_it_stands_and_with_its_comments_taken_in(tmp_path):
    example = ROOT / "octavo.example.yaml"
    server, config = load_settings(example, {}, {}, BOTH)
    assert server == ServerConfig() and config.max_waiting_requests == 1000
    lines = [
        line.removeprefix("# ") if line.removeprefix("# ").split(":")[0] in NAMES else line for line in example.read_text().splitlines()
    ]
    (tmp_path / "all.yaml").write_text("\n".join(lines))
    server, config = load_settings(tmp_path / "all.yaml", {}, {}, BOTH)
    assert server.api_key_file == "keys.txt" and config.threads == 2 and "gpt-4o-mini" in server.served_model_name
