"""A short soak in every run of the suite (the long one: tools/soak.py), and that it sees a wrong bit."""

from __future__ import annotations

import pytest

from octavo.engine.kv_cache_manager import KVCacheManager
from tests.e2e.soak import LOADS, MUST_HAPPEN, Shape, draw_jobs, soak
from tests.tiny_models import write_tiny

pytest.importorskip("octavo._native", reason="the native module is not built")

#: The byte tokenizer's own tokens and those it has no text for.
TINY = Shape(ids=range(0, 272), prompt=96, answer=32)
SMOLLM2 = Shape(ids=range(1000, 40000), prompt=48, answer=12)


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory):
    model = write_tiny(tmp_path_factory.mktemp("soak"), fmt="gguf", quant="Q4_0", seed=3)
    return {"model": str(model.path), "backend": "cpu", "max_model_len": 144}


def test_a_hundred_and_fifty_requests(tiny_config):
    outcome = soak(draw_jobs(150, 1, TINY), tiny_config, pool=12, room=100, seed=1)
    assert outcome.requests == 150 and outcome.beams >= 5
    assert all(outcome.stats[name] for name in MUST_HAPPEN), outcome.stats
    assert {"length", "stop string", "stop id", "stop", "abort"} == outcome.reasons.keys()


def test_smollm2(smollm2_path):
    config = {"model": str(smollm2_path), "backend": "cpu"}
    outcome = soak(draw_jobs(20, 2, SMOLLM2), config, pool=7, room=40, seed=2, loads=LOADS[:1])
    assert outcome.requests == 20
    assert all(outcome.stats[name] for name in ("preemptions", "prefix_hit_tokens", "forks", "steps_replayed")), outcome.stats


def test_a_block_that_is_not_copied_is_seen(tiny_config, monkeypatch):
    """A choice then reads, for the end of its prompt, whatever was in its block before."""
    take = KVCacheManager.take_copies
    monkeypatch.setattr(KVCacheManager, "take_copies", lambda kv: take(kv)[1:])
    with pytest.raises(AssertionError, match="differs"):
        soak(draw_jobs(60, 1, TINY), tiny_config, pool=12, room=100, seed=1)
