"""What the tests of the server share: one real server for the whole session, to be left idle by every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.real_server import RealServer, real_server


@pytest.fixture(scope="session")
def real(smollm2_path: Path) -> Iterator[RealServer]:
    """`octavo serve smollm2` without a key."""
    with real_server() as server:
        yield server
