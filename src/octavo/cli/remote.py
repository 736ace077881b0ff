"""A model behind a URL: the client of any OpenAI-compatible server, for `octavo chat --url`.

Owner of the connection while an answer streams; each request has its own, so that closing it is what ends the request.
The server is not trusted: sizes, times and types are checked, and its words reach the user as one line.
Imports no engine and no NumPy. Not here: the terminal (chat.py), the framing of events (event_stream.py), what requests and
replies hold (api_messages.py).
"""

from __future__ import annotations

import ipaddress
import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2

from octavo.cli.answer import Answer
from octavo.cli.api_messages import CONTEXT_CODES, count, explanation, one_line, request_body, token_counts, valid_unicode
from octavo.cli.chat_session import ChatSession
from octavo.cli.event_stream import event_data
from octavo.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.outputs import CompletionDelta
from octavo.sampling_params import SamplingParams

KEY_VARIABLES = ("OCTAVO_API_KEY", "OPENAI_API_KEY")
CONNECT_SECONDS = 10.0
#: How long a server may be silent: a long prompt on a slow machine takes minutes.
SILENT_SECONDS = 300.0
#: The longest any answer may take, however it trickles.
ANSWER_SECONDS = 3600.0
LIST_SECONDS = 20.0
MAX_ANSWER_BYTES = 64 << 20
MAX_LIST_BYTES = 4 << 20
MAX_ERROR_BYTES = 64 << 10

_CONTEXT_WORDS = re.compile(r"maximum context length|context (length|size|window)|max_model_len", re.IGNORECASE)


def base_url(text: str) -> str:
    """The URL below which the API's paths are, from what a person gives. Raises ConfigError."""
    text = text.strip()
    try:
        if len(text.split()) > 1:
            raise ValueError
        url = httpx2.URL(text if "://" in text else f"http://{text}")
    except (httpx2.InvalidURL, UnicodeError, ValueError):
        raise ConfigError("--url: not a URL (write for example http://127.0.0.1:8000)") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError("--url: must begin with http:// or https:// and a host")
    if url.userinfo or url.query or url.fragment:
        raise ConfigError("--url: give it without a user, a password, ? and #; keys come from the environment (--api-key-env)")
    path = url.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    versioned = any(re.fullmatch(r"v\d+\w*", part) for part in path.split("/"))
    return str(url.copy_with(path=path if versioned else f"{path}/v1"))


def find_key(env: Mapping[str, str], variable: str | None, base: str) -> str | None:
    """The key to send to `base`, or None. Raises ConfigError, which never shows a value.

    OCTAVO_API_KEY may hold several keys for a server: the first is sent. OPENAI_API_KEY, set for another service perhaps,
    is not sent in the clear to another machine unless it is named.
    """
    name = variable
    if name is None:
        name = next((known for known in KEY_VARIABLES if env.get(known, "").strip()), None)
        if name is None or (name == "OPENAI_API_KEY" and base.startswith("http:") and not is_loopback(base)):
            return None
    key = env.get(name, "").strip()
    if name == "OCTAVO_API_KEY":
        key = key.split(",")[0].strip()
    if not key:
        raise ConfigError("--api-key-env: there is no such variable, or it is empty")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(f"{name}: a key holds only visible ASCII characters")
    return key


def is_loopback(base: str) -> bool:
    host = httpx2.URL(base).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RemoteModel:
    """One model of one server. Every method raises OctavoError where the server cannot be used."""

    remote = True

    def __init__(self, base: str, key: str | None, model: str | None = None, *, silent_seconds: float = SILENT_SECONDS) -> None:
        """Asks for the list of models where `model` is None, and takes the first."""
        self.base = base
        self._key = key
        headers = {"Accept-Encoding": "identity", "User-Agent": "octavo"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(silent_seconds, connect=CONNECT_SECONDS),
            trust_env=not is_loopback(base),  # no proxy between us and this machine
            # reading the certificates takes longer than the rest; an empty context trusts nobody
            verify=True if base.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            limits=httpx2.Limits(max_keepalive_connections=0),
        )
        self._silent_seconds = silent_seconds
        #: Fields this server turned out to refuse, and are not sent again.
        self._without: set[str] = set()
        self._usage: tuple[int, int, int] | None = None
        self._sent_characters = 0
        self._tokens_per_character: float | None = None
        self.max_model_len: int | None = None
        self.generation_defaults: Mapping[str, Any] = {}
        try:
            self.name = model if model is not None else self._first_model()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._client.close()

    def greeting(self) -> str:
        return f"{self.name} at {self.base}"

    def make_room(self, session: ChatSession) -> int:
        """Keeps room for an answer, by the last answer's tokens a character; else only the server's refusal makes turns go."""
        if self.max_model_len is None or self._tokens_per_character is None:
            return 0
        rate = self._tokens_per_character
        return session.make_room(self.max_model_len, lambda messages: round(rate * _characters(messages)))

    def stats(self) -> dict[str, Any]:
        return {"server": self.base, "model": self.name}

    def why(self) -> str:
        raise OctavoError("a server keeps the record of its steps to itself here: octavo trace server records one of ours")

    # -- one answer ----------------------------------------------------------------------------------------------------
    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[CompletionDelta]:
        """The answer in pieces, the last one with a finish_reason; closing the iterator closes the connection.

        Tokens are not told apart by this API: the deltas have text only, see `complete`.
        Raises InvalidRequestError with code context_length_exceeded, before any text, where the messages are too long.
        """
        self._usage = None
        self._sent_characters = _characters(messages)
        deadline = time.monotonic() + ANSWER_SECONDS
        response = self._accepted(messages, params, deadline)
        finish: str | None = None
        done = begun = False
        try:
            for chunk in self._chunks(response, deadline):
                if chunk is None:
                    done = True
                    break
                text, reason = self._read_chunk(chunk, begun)
                finish = reason or finish
                if text:
                    begun = True
                    yield CompletionDelta("", 0, text)
        except httpx2.HTTPError as error:
            if finish is None:
                raise self._broken(error) from None
        finally:
            response.close()
        if finish is None and not done:
            raise OctavoError(f"{self.base} closed the connection before the answer was complete")
        if finish in ("error", "abort"):
            raise OctavoError(f"{self.base} gave the request up")
        other = finish if finish not in ("length", "stop") else None
        yield CompletionDelta("", 0, finish_reason="length" if finish == "length" else "stop", stop_reason=other)

    def complete(self, answer: Answer) -> None:
        """Put the server's own counts into the answer; without them its pieces are what was counted."""
        if self._usage is None:
            answer.unit, answer.num_tokens = "chunk", answer.num_pieces
        else:
            answer.num_prompt_tokens, answer.num_tokens, answer.output.num_cached_tokens = self._usage
            self._tokens_per_character = (self._usage[0] + self._usage[1]) / max(self._sent_characters + len(answer.text), 1)

    def _accepted(self, messages: list[dict[str, str]], params: SamplingParams, deadline: float) -> httpx2.Response:
        """The reply with status 200. A field that only some servers know is left out, once, where its name is in a refusal."""
        while True:
            body = request_body(self.name, messages, params, self._without)
            response = self._send("POST", "/chat/completions", body)
            if response.status_code == 200:
                return response
            text = self._read(response, MAX_ERROR_BYTES, deadline, cut=True)
            # "max_completion_tokens" is the advice of servers that refuse max_tokens
            refused = {
                field
                for field, word in (("stream_options", "stream_options"), ("max_tokens", "max_completion_tokens"))
                if word in text and field not in self._without and response.status_code in (400, 422)
            }
            if not refused:
                raise self._refusal(response, text)
            self._without |= refused

    def _chunks(self, response: httpx2.Response, deadline: float) -> Iterator[dict[str, Any] | None]:
        """The objects of the stream; None for its end mark. A server that does not stream gives one."""
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        if "html" in kind:
            raise self._no_api(f"it answers with {one_line(kind)}")
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise OctavoError(f"{self.base} compressed its answer, though it was asked not to")
        if kind == "application/json":
            yield self._object(self._read(response, MAX_ANSWER_BYTES, deadline))
            yield None
            return
        for data in event_data(self._pieces(response, MAX_ANSWER_BYTES, deadline)):
            yield None if data.strip() == "[DONE]" else self._object(data)

    def _read_chunk(self, chunk: dict[str, Any], begun: bool) -> tuple[str, str | None]:
        """(text, finish_reason) of one object; notes the usage. Raises for an error event."""
        if chunk.get("error"):
            message, code = explanation(chunk)
            if code in CONTEXT_CODES and not begun:
                raise InvalidRequestError(self._hidden(message), code="context_length_exceeded")
            raise OctavoError(f"{self.base} gave the request up: {self._hidden(message) or 'no reason given'}")
        self._usage = token_counts(chunk.get("usage")) or self._usage
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise self._no_api("its objects have no choices")
        choice = choices[0] if choices else {}
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            return "", None
        content = choice.get("delta") or choice.get("message") or {}
        text = next((value for name in ("content", "refusal") if isinstance(content, dict) and (value := content.get(name))), "")
        reason = choice.get("finish_reason")
        if not isinstance(text, str) or not (reason is None or isinstance(reason, str)):
            raise self._no_api("the text of its answer is not text")
        return valid_unicode(text), one_line(reason)[:40] if reason else None

    # -- the list of models --------------------------------------------------------------------------------------------
    def _first_model(self) -> str:
        deadline = time.monotonic() + LIST_SECONDS
        response = self._send("GET", "/models", None, timeout=httpx2.Timeout(CONNECT_SECONDS))
        if response.status_code != 200:
            raise self._refusal(response, self._read(response, MAX_ERROR_BYTES, deadline, cut=True))
        if "html" in response.headers.get("content-type", ""):
            response.close()
            raise self._no_api("it answers with text/html")
        listed = self._object(self._read(response, MAX_LIST_BYTES, deadline)).get("data")
        for entry in listed if isinstance(listed, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"].strip():
                self.max_model_len = count(entry.get("max_model_len")) or None
                return valid_unicode(entry["id"])
        raise OctavoError(f"{self.base} lists no models; name one with --model")

    # -- requests and replies ------------------------------------------------------------------------------------------
    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: httpx2.Timeout | None = None) -> httpx2.Response:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        try:
            return self._client.send(self._client.build_request(method, self.base + path, json=body, **options), stream=True)
        except httpx2.HTTPError as error:
            raise self._broken(error) from None

    def _pieces(self, response: httpx2.Response, limit: int, deadline: float) -> Iterator[bytes]:
        """The body, as sent. Raises OctavoError beyond `limit` bytes or after `deadline`."""
        size = 0
        for piece in response.iter_raw():
            size += len(piece)
            if size > limit:
                raise OctavoError(f"{self.base} sent more than {limit} bytes")
            if time.monotonic() > deadline:
                raise OctavoError(f"{self.base} did not come to an end in time")
            yield piece

    def _read(self, response: httpx2.Response, limit: int, deadline: float, *, cut: bool = False) -> str:
        """The whole body as text, and the connection closed. `cut`: up to `limit` is enough."""
        data = b""
        try:
            for piece in self._pieces(response, limit + (1 << 20 if cut else 0), deadline):
                data += piece
                if cut and len(data) >= limit:
                    break
        except httpx2.HTTPError as error:
            if not cut:
                raise self._broken(error) from None
        finally:
            response.close()
        return data[:limit].decode("utf-8", "replace")

    def _object(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise self._no_api("its answer is not JSON") from None
        if not isinstance(value, dict):
            raise self._no_api("its answer is not an object")
        return value

    # -- what went wrong -----------------------------------------------------------------------------------------------
    def _refusal(self, response: httpx2.Response, text: str) -> OctavoError:
        """The error for a status that is not 200."""
        status = response.status_code
        message, code = explanation(text)
        said = f": {self._hidden(message)}" if message else ""
        if status == 401:
            way = f"set {KEY_VARIABLES[0]}, or name the variable that holds it with --api-key-env"
            return OctavoError(f"{self.base} refuses the key (401)" if self._key else f"{self.base} needs a key (401): {way}")
        if 300 <= status < 400:
            return OctavoError(f"{self.base} moved to {one_line(response.headers.get('location', 'another place'))}: give that as --url")
        if status == 404 and not message:
            return self._no_api("404")
        if status in (400, 413, 422) and (code in CONTEXT_CODES or _CONTEXT_WORDS.search(message)):
            return InvalidRequestError(f"{self.base} refuses the request ({status}){said}", code="context_length_exceeded")
        if status in (400, 422):
            return InvalidRequestError(f"{self.base} refuses the request ({status}){said}")
        wait = response.headers.get("retry-after", "")
        again = f"; try again in {wait} s" if re.fullmatch(r"[0-9]{1,6}", wait) else "; check --url and --model" if status == 404 else ""
        otherwise = "failed" if status >= 500 else "refuses the request"
        what = {404: "does not have that", 429: "is busy", 503: "is not ready"}.get(status, otherwise)
        return OctavoError(f"{self.base} {what} ({status}){said}{again}")

    def _broken(self, error: httpx2.HTTPError) -> OctavoError:
        """The error for a connection that did not work."""
        if isinstance(error, httpx2.ConnectTimeout):
            return OctavoError(f"{self.base} cannot be reached: no answer within {CONNECT_SECONDS:g} s")
        if isinstance(error, httpx2.ConnectError):
            reason = re.sub(r"^\[Errno -?\d+\] ", "", one_line(str(error)))
            return OctavoError(f"{self.base} cannot be reached: {reason or 'no connection'}; is the server running?")
        if isinstance(error, httpx2.TimeoutException):
            return OctavoError(f"{self.base} was silent for {self._silent_seconds:g} s")
        return OctavoError(f"the connection to {self.base} broke: {one_line(str(error)) or type(error).__name__}")

    def _no_api(self, reason: str) -> OctavoError:
        return OctavoError(f"{self.base} is not an OpenAI-compatible API ({reason}); check --url")

    def _hidden(self, message: str) -> str:
        """A server may quote the key it was sent."""
        return message.replace(self._key, "***") if self._key else message


def _characters(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)
