"""The client of GET /v1/octavo/steps: asks a server for its steps while they happen.

Owner of the connection. The server is not trusted: sizes, times and types are checked. Not here: what is done with the steps (trace.py).
"""

from __future__ import annotations

import os
import time

import httpx2

from octavo.cli.api_messages import explanation, one_line
from octavo.cli.remote import base_url, find_key, is_loopback
from octavo.errors import OctavoError
from octavo.trace.record import Piece, Trace, check, decode_piece

#: Seconds between two questions, and for one answer.
INTERVAL, PATIENCE = 0.25, 20.0
PIECE = 512
#: Of one answer, and of a whole record.
MAX_ANSWER_BYTES, MOST_STEPS = 64 << 20, 200_000


def record(url: str, api_key_env: str | None, seconds: float) -> Trace:
    """What the server computes from now on. Raises OctavoError; Ctrl-C ends it early, with what there is."""
    base = base_url(url)
    if not is_loopback(base):
        raise OctavoError("a server tells its steps to its own machine only: run this there, or through an SSH tunnel")
    key = find_key(os.environ, api_key_env, base)
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    with httpx2.Client(headers=headers, timeout=PATIENCE, trust_env=False, verify=False) as client:
        return _record(client, base, seconds)


def _record(client: httpx2.Client, base: str, seconds: float) -> Trace:
    first = _ask(client, base, {"limit": 1})
    last = first.steps[-1].step if first.steps else 0
    trace = Trace([], first.model, first.block_size, first.num_blocks)
    limit, stop = time.monotonic() + seconds, False
    try:
        while not stop:
            stop = time.monotonic() >= limit
            while True:
                piece = _ask(client, base, {"limit": PIECE, "after": last})
                if piece.restarts != first.restarts:
                    raise OctavoError(f"the engine of {base} was started again in between: record once more")
                if piece.steps:
                    trace.gaps |= piece.steps[0].step != last + 1
                    last = piece.steps[-1].step
                    trace.steps += piece.steps
                stop |= len(trace.steps) >= MOST_STEPS
                if stop or len(piece.steps) < PIECE:
                    break
            if not stop:
                time.sleep(min(INTERVAL, max(0.0, limit - time.monotonic())))
    except KeyboardInterrupt:
        pass
    trace.gaps |= last > len(trace.steps)
    check(trace, base)
    return trace


def _ask(client: httpx2.Client, base: str, query: dict[str, int]) -> Piece:
    try:
        with client.stream("GET", f"{base}/octavo/steps", params=query) as response:
            data = b""
            for part in response.iter_bytes():
                data += part
                if len(data) > MAX_ANSWER_BYTES:
                    raise OctavoError(f"{base} sent more than {MAX_ANSWER_BYTES} bytes")
    except httpx2.HTTPError as error:
        raise OctavoError(f"{base} cannot be asked: {one_line(str(error)) or type(error).__name__}; is the server running?") from None
    if response.status_code != 200:
        said = explanation(data[: 1 << 16].decode("utf-8", "replace"))[0]
        hint = "set OCTAVO_API_KEY, or name the variable that holds the key with --api-key-env" if response.status_code == 401 else said
        raise OctavoError(f"{base} does not tell its steps ({response.status_code}): {hint or 'it is no server of ours, or an older one'}")
    return decode_piece(data, base)
