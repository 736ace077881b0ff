"""Models with sliding windows, whole engine: the logits of transformers, the same bits whatever else happens, bounded blocks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.outputs import OutputAccumulator, RequestOutput
from octavo.wiring import EngineParts
from tests.models import harness
from tests.tiny_models import hf_model, write_tiny

pytest.importorskip("torch")
NATIVE = pytest.mark.skipif(find_spec("octavo._native") is None, reason="the native module is not built")
BACKENDS = ["reference", "torch", pytest.param("cpu", marks=NATIVE)]
WINDOW, BLOCK = 20, 16
#: Layers with a window, of four.
KINDS = {"all": [True] * 4, "alternating": [False, True] * 2}
Work = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = {}

    def make(kind: str):
        if kind not in made:
            layers = ["sliding_attention" if sliding else "full_attention" for sliding in KINDS[kind]]
            settings = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0, "layer_types": layers}
            path = tmp_path_factory.mktemp(kind) / "model"
            made[kind] = write_tiny(path, family="qwen2", seed=4, num_hidden_layers=4, **settings)
        return made[kind]

    return make


def load(path: Path, backend: str = "cpu", **settings) -> EngineParts:
    return EngineParts.load(EngineConfig(model=str(path), backend=backend, **{"kv_dtype": "f32", "num_kv_blocks": 64, **settings}))


def work_of(count: int, longest: int, *, shared: int = 0, n: int = 1, seed: int = 5, most: int = 30) -> Work:
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 250, shared).tolist()
    return [
        (
            prefix + rng.integers(0, 250, int(rng.integers(1, longest))).tolist(),
            SamplingParams(n=n, temperature=0.8, seed=i, max_tokens=most, ignore_eos=True, logprobs=1),
        )
        for i in range(count)
    ]


def run(parts: EngineParts, work: Work, core=None) -> list[RequestOutput]:
    """All at once; after every step the invariants, and the bound on blocks of a window's group."""
    core, inputs = core or parts.core(), parts.input_processor()
    found = {}
    for i, (prompt, params) in enumerate(work):
        core.add_request(inputs.process(f"r{i}", prompt, params))
        found[f"r{i}"] = OutputAccumulator(f"r{i}", None, prompt, params.n)
    while core.has_unfinished_requests():
        for delta in core.step():
            found[delta.request_id].add(delta)
        core.check_invariants()
        check_bound(core)
    assert core.kv.num_used_blocks == 0
    return [item.output for item in found.values()]


def check_bound(core) -> None:
    most = -(-(WINDOW + core.config.max_num_batched_tokens) // BLOCK) + 1
    for request in core.scheduler.running():
        for group, table in zip(core.kv.groups, core.kv.block_tables(request), strict=True):
            if group.sliding_window is not None:
                assert len(table) - table.count(-1) <= most


def exact(outputs: list[RequestOutput]) -> list:
    return [[(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs] for output in outputs]


def alone(path: Path, work: Work, **settings) -> list:
    parts = load(path, enable_prefix_caching=False, **settings)
    return [exact(run(parts, [one]))[0] for one in work]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_transformers(tiny, kind, backend):  # F14
    """A prompt of ten windows in chunks, then an answer of two: the engine's own logprobs of every token."""
    import torch

    model = tiny(kind)
    parts = load(model.path, backend, max_num_batched_tokens=24)
    assert [group.sliding_window for group in parts.executor.info.kv_groups] == ([WINDOW] if kind == "all" else [None, WINDOW])
    prompt = np.random.default_rng(1).integers(0, 250, 10 * WINDOW).tolist()
    core = parts.core()
    params = SamplingParams(temperature=0, max_tokens=2 * WINDOW, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    output = run(parts, [(prompt, params)], core)[0]
    tokens = prompt + output.outputs[0].token_ids
    with torch.no_grad():
        theirs = torch.log_softmax(hf_model(model)(torch.tensor([tokens])).logits[0].double(), -1).numpy()
    ours = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(ours) == len(tokens) - 1
    for position, logprobs in enumerate(ours):
        assert logprobs[tokens[position + 1]].logprob == pytest.approx(theirs[position, tokens[position + 1]], abs=2e-3)
    assert core.stats.blocks_freed_behind_window >= 11


@NATIVE
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_that_is_left_out_is_noticed(tiny, kind):
    """The oracle of the other tests can tell: without the window the logits differ."""
    model = tiny(kind)
    executor = harness.load(model.path, backend="cpu", kv_dtype="f32")
    tokens = np.random.default_rng(1).integers(0, 250, 3 * WINDOW).tolist()
    before = harness.all_logits(executor, tokens)
    for layer in executor.runner.model.layers:
        layer.attn.window = None
    after = harness.all_logits(harness.load(model.path, backend="cpu", kv_dtype="f32"), tokens)
    assert np.array_equal(before, after)
    after = harness.all_logits(executor, tokens)
    assert np.array_equal(before[:WINDOW], after[:WINDOW]) and not np.allclose(before[WINDOW:], after[WINDOW:], atol=1e-2)


@NATIVE
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_batches_give_the_same_bits(tiny, kind, chunk):
    work = work_of(6, 120)
    expected = alone(tiny(kind).path, work)
    parts = load(tiny(kind).path, max_num_batched_tokens=chunk)
    core = parts.core()
    assert exact(run(parts, work, core)) == expected
    assert core.stats.blocks_freed_behind_window > 20 and core.stats.preemptions == 0


@NATIVE
@pytest.mark.parametrize("kind", KINDS)
def test_preemption_gives_the_same_bits(tiny, kind):
    """Short prompts are admitted together, and their answers grow beyond the pools."""
    work = work_of(8, 14, most=70, seed=9)
    expected = alone(tiny(kind).path, work)
    parts = load(tiny(kind).path, num_kv_blocks=7, max_num_batched_tokens=40)
    core = parts.core()
    assert exact(run(parts, work, core)) == expected
    assert core.stats.preemptions > 0 and core.stats.blocks_freed_behind_window > 20


@NATIVE
@pytest.mark.parametrize("pool", [128, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_prefix_hits_and_forks_give_the_same_bits(tiny, kind, pool):
    """A beginning of five windows: found again, though blocks of it were given up; in a small pool they are taken by others."""
    work = work_of(5, 40, shared=5 * WINDOW) + work_of(2, 60, shared=3 * WINDOW, n=3)
    expected = alone(tiny(kind).path, work)
    parts = load(tiny(kind).path, num_kv_blocks=pool, max_num_batched_tokens=48)
    core = parts.core()
    run(parts, work[:1], core)
    for _ in range(2):
        assert exact(run(parts, work, core)) == expected
    stats = core.stats
    assert stats.prefix_hit_tokens > (800 if pool == 128 else 60) and stats.forks > 0 and stats.blocks_freed_behind_window > 20


@NATIVE
def test_a_hit_reads_nothing_behind_the_window(tiny):
    """Every block of the window's pool that a hit does not hold is filled with infinities: the answer stays the same bits."""
    path = tiny("alternating").path
    prompt = np.random.default_rng(3).integers(0, 250, 6 * WINDOW).tolist()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    parts = load(path)
    core = parts.core()
    first = exact(run(parts, [(prompt, params)], core))
    core.add_request(parts.input_processor().process("again", prompt, params))
    accumulator = OutputAccumulator("again", None, prompt, 1)
    held: set[int] = set()
    while core.has_unfinished_requests():
        for delta in core.step():
            accumulator.add(delta)
        running = list(core.scheduler.running())
        if running:
            table = core.kv.block_tables(running[0])[1]
            assert table[:2] == [-1, -1]
            held = {block for block in table if block >= 0}
        ops, pool = parts.executor.ops, parts.executor.runner.kv[1]
        for block in range(core.kv.pools[1].num_blocks):
            if block not in held:
                ops.import_block(pool, block, np.full_like(ops.export_block(pool, block), np.inf))
    assert core.stats.prefix_hit_tokens == 6 * WINDOW - 1 - (6 * WINDOW - 1) % BLOCK
    assert exact([accumulator.output]) == first


def test_memory_is_divided_between_the_groups(tiny):
    """As sequences of four windows need it, and never more than could be used."""
    path = tiny("alternating").path
    parts = load(path, "reference", num_kv_blocks=None, kv_cache_memory="512KiB", max_num_batched_tokens=32, max_num_seqs=1000)
    full, window = parts.executor.info.kv_groups
    assert (full.sliding_window, window.sliding_window) == (None, WINDOW)
    used = full.num_blocks * parts.executor.info.block_bytes[0] + window.num_blocks * parts.executor.info.block_bytes[1]
    assert (512 << 10) * 0.95 < used <= 512 << 10
    assert full.num_blocks * 5 == pytest.approx(window.num_blocks * 5, abs=5)  # four windows: 5 blocks; window and chunk: no fewer
    parts = load(path, "reference", num_kv_blocks=None, max_num_batched_tokens=32, max_num_seqs=3)
    assert [group.num_blocks for group in parts.executor.info.kv_groups] == [3 * 16, 3 * 5]


def test_a_window_longer_than_every_sequence_is_none(tiny):
    parts = load(tiny("alternating").path, "reference", max_model_len=WINDOW)
    assert [group.sliding_window for group in parts.executor.info.kv_groups] == [None]
