"""Errors a caller can act on.

Purpose: one small hierarchy, so that the CLI can turn any of them into one line and an exit code and the
server into an HTTP status. Plain data: every module may import this one.
Not here: control flow inside the engine, which never uses exceptions to pass results.
"""

from __future__ import annotations


def shown(value: object, limit: int = 80) -> str:
    """repr of a hostile value for a message: one short line, whatever it is (repr of an integer of 5000 digits raises)."""
    try:
        text = repr(value)
    except Exception:  # a value's own repr may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class OctavoError(Exception):
    """Base of every error whose message is meant for the user as it stands (one line, says what to do)."""


class InvalidRequestError(OctavoError, ValueError):
    """A request that must be refused before it reaches the engine (HTTP 400).

    `param` names the offending field, `code` is a stable machine-readable word
    (for example `context_length_exceeded`).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(OctavoError, ValueError):
    """A setting that cannot be used (CLI exit code 2)."""


class ModelLoadError(OctavoError):
    """A model that cannot be found, or whose files are damaged, incomplete or of an unsupported kind."""


class TemplateError(InvalidRequestError):
    """A chat template refused the messages (its own message is passed on) or took too long."""


class EngineDeadError(OctavoError, RuntimeError):
    """The engine core has failed; every waiting request gets this error at once."""
