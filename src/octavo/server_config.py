"""ServerConfig: every setting of `octavo serve` beyond the engine's. YAML file, environment, flags and Python read this class.

Plain data, validated on construction; names as in config.py: `drain_timeout` in Python and YAML, `--drain-timeout`,
`OCTAVO_DRAIN_TIMEOUT`. One file may hold the settings of both classes.
Not here: settings of the engine (config.py), what the server does with them (server/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.config import parse_bytes
from octavo.errors import ConfigError, shown


def _setting(default: Any, help: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "secret": secret}, repr=not secret)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = _setting("127.0.0.1", "address to listen on; anything but loopback is reachable from other machines")
    port: int = _setting(8000, "port to listen on; 0: a free one")
    #: Never in a log or a repr.
    api_key: Sequence[str] = _setting(
        (), "key that clients must send; better in OCTAVO_API_KEY or a file, since all users of this machine see arguments", secret=True
    )
    api_key_file: str | None = _setting(None, "file with one key a line, # begins a comment")
    served_model_name: Sequence[str] = _setting((), "names of the model in the API, the first is the one reported; default: MODEL")
    allowed_origins: Sequence[str] = _setting((), "web origins that may read answers (CORS); none by default")
    allowed_hosts: Sequence[str] = _setting((), "names accepted in the Host header; default: loopback names when listening on loopback")
    max_body: int | str = _setting("8MiB", "largest request body")
    max_json_depth: int = _setting(32, "deepest nesting in a request body")
    max_prompts: int = _setting(128, "most prompts in one request")
    max_choices: int = _setting(128, "most answers (prompts times n) in one request")
    input_timeout: float = _setting(20.0, "seconds that checking, rendering and tokenising one request may take")
    body_timeout: float = _setting(60.0, "seconds a client may take to send its body")
    send_timeout: float = _setting(120.0, "seconds a client may leave a stream unread")
    step_timeout: float = _setting(180.0, "seconds without a finished step, while there is work, before the engine is restarted")
    stream_interval: int = _setting(1, "tokens of an answer gathered before they are sent on; more costs less and streams less evenly")
    drain_timeout: float = _setting(30.0, "seconds that running requests get to finish after SIGTERM")

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the instance is frozen: normalised once, here
        for name in ("api_key", "served_model_name", "allowed_origins", "allowed_hosts"):
            value = getattr(self, name)
            items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (None,)
            if not all(isinstance(item, str) and item.strip() for item in items):
                what = "a list of non-empty texts" if name == "api_key" else f"a list of non-empty texts, got {shown(value)}"
                raise ConfigError(f"{name} must be {what}")
            set_(self, name, tuple(item.strip() for item in items))
        set_(self, "max_body", parse_bytes(self.max_body, "max_body"))
        for name, low, high in (("port", 0, 65535), ("max_body", 1024, 2**31), ("max_json_depth", 4, 200), ("max_prompts", 1, 4096),
                                ("max_choices", 1, 4096), ("stream_interval", 1, 1000)):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, got {shown(value)}")
        for name in ("input_timeout", "body_timeout", "send_timeout", "step_timeout", "drain_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400:
                raise ConfigError(f"{name} must be a number of seconds above 0 and up to 86400, got {shown(value)}")
            set_(self, name, float(value))
        for name in ("host", "api_key_file"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (value is None and name == "api_key_file"):
                raise ConfigError(f"{name} must be text, got {shown(value)}")
        for name in ("allowed_origins", "allowed_hosts"):
            for item in getattr(self, name):
                if "," in item or len(item.split()) > 1:  # would match nothing, and nobody would know why
                    raise ConfigError(f"{name} must be a list with one entry each, got {shown(item)}")
        if "*" in self.allowed_origins:
            raise ConfigError("allowed_origins: '*' would let any web page use this server; list the origins")
