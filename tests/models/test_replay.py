"""A recorded step, replayed by one native call, against the same step called op by op: raw bits of logits and KV, for random
batches through a whole model; the same errors; and nothing left behind by an error or an interrupt."""

from __future__ import annotations

import logging
import signal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.ops.api import KVSpec, Taps
from tests.models import harness
from tests.tiny_models import write_tiny

_native = pytest.importorskip("octavo._native", reason="the native module is not built")
LEVELS = _native.isa_levels()
MODELS = {
    "llama, 4-bit": {"family": "llama", "fmt": "gguf", "quant": "Q4_1", "num_hidden_layers": 3},
    "qwen2, window, float": {
        "family": "qwen2", "fmt": "safetensors", "dtype": "bfloat16", "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return {name: write_tiny(tmp_path_factory.mktemp("tiny") / "m", seed=5, **kind).path for name, kind in MODELS.items()}


class Pair:
    """The same model twice, replayed and eager, fed the same sequences."""

    def __init__(self, path, seed: int = 0, **engine) -> None:
        self.executors = [harness.load(path, backend="cpu", replay=replay, **engine) for replay in (True, False)]
        self.sequences = [harness.Sequences(executor, np.random.default_rng(seed)) for executor in self.executors]
        self.replays: list[bool] = []

    def add(self, name: str, tokens: list[int], num_prompt: int) -> None:
        for sequences in self.sequences:
            sequences.add(name, tokens, num_prompt)

    def step(self, work: list[tuple[str, int]], logits_rows: list[int] | None = None) -> None:
        """One batch on both; asserts equal bits of the logits."""
        found = []
        for executor, sequences in zip(self.executors, self.sequences, strict=True):
            _, batch = sequences.batch(work)
            if logits_rows is not None:
                batch.logits_rows = np.array(logits_rows, np.int32)
                batch.num_generated_logits = int((batch.logits_rows < batch.num_generated).sum())
            executor.ops.begin_step(batch.num_rows)
            logits, replayed = executor.runner.forward(batch)
            found.append((logits.copy() if len(batch.logits_rows) else None, replayed))
        (ours, replayed), (theirs, eager) = found
        assert not eager
        self.replays.append(replayed)
        if ours is None:
            return
        assert ours.shape == theirs.shape and np.isfinite(ours).all() and ours.any()
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))

    def check_kv(self) -> None:
        """Every block of the pools holds the same bits."""
        for number, group in enumerate(self.executors[0].info.kv_groups):
            for block in range(group.num_blocks):
                blocks = [e.ops.export_block(e.runner.kv[number], block) for e in self.executors]
                np.testing.assert_array_equal(blocks[0].view(np.uint32), blocks[1].view(np.uint32))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_batches(tiny, model, isa, data):
    """Prompts in chunks and generated rows mixed, 1 row to many times the arena's capacity, 1 to 3 threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CPU_ISA", isa)
        capacity = data.draw(st.integers(1, 40), "capacity")
        pair = Pair(tiny[model], num_kv_blocks=48, threads=data.draw(st.integers(1, 3), "threads"), max_num_batched_tokens=capacity)
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 9)), min_size=1, max_size=5), "prompt and generated tokens")
    left = {}
    for i, (prompt, generated) in enumerate(shapes):
        pair.add(f"s{i}", rng.integers(0, 256, prompt + generated).tolist(), prompt)
        left[f"s{i}"] = [prompt, generated]
    expected = []
    epochs = set()
    arena = pair.executors[0].ops.arena
    while any(map(any, left.values())):
        work = []
        for name, counts in left.items():
            kind = 0 if counts[0] else 1
            count = int(rng.integers(0, counts[kind] + 1)) if rng.random() < 0.8 else min(1, counts[kind])
            counts[kind] -= count
            work += [(name, count)] if count else []
        if not work:
            continue
        rows = sum(count for _, count in work)
        wanted = np.flatnonzero(rng.random(rows) < 0.5).tolist() if rng.random() < 0.8 else None
        before = arena.epoch
        pair.step(work, wanted)
        recorded = bool(epochs) and arena.epoch == before and before in epochs
        expected.append(recorded)
        if wanted is None or wanted:
            epochs = {arena.epoch}
    assert pair.replays == expected
    pair.check_kv()


def test_recorded_again_when_the_arena_grows(tiny):
    pair = Pair(tiny["llama, 4-bit"], max_num_batched_tokens=4)
    pair.add("a", [7] * 200, 200)
    for count in (1, 3, 4, 5, 8, 1, 30, 2, 100):
        pair.step([("a", count)])
    assert pair.replays == [False, True, True, False, True, True, False, True, False]
    pair.check_kv()


def test_recorded_again_for_another_pool(tiny):
    """A replay into the pool of the recording would write where nobody looks."""
    pair = Pair(tiny["llama, 4-bit"])
    pair.add("a", list(range(80)), 80)
    pair.step([("a", 20)])
    for executor in pair.executors:
        (old,) = executor.runner.kv
        executor.runner.kv = (executor.ops.alloc_kv(KVSpec(3, 256, 16, 2, 16, "bf16")),)
        for block in range(256):
            executor.ops.import_block(executor.runner.kv[0], block, executor.ops.export_block(old, block))
    for _ in range(2):
        pair.step([("a", 20)])
    assert pair.replays == [False, False, True]
    pair.check_kv()


def test_no_logits_wanted(tiny):
    """The first steps of a long prompt record nothing; replayed, such a step still writes its KV."""
    pair = Pair(tiny["llama, 4-bit"])
    pair.add("a", list(range(60)), 60)
    pair.step([("a", 10)], [])
    pair.step([("a", 10)], [9])
    pair.step([("a", 10)], [])
    pair.step([("a", 10)], [0, 9])
    assert pair.replays == [False, False, True, True]
    pair.check_kv()


def test_smollm2(smollm2_path):
    """The real model: prompts in chunks beside running answers, and an arena that grows on the way."""
    rng = np.random.default_rng(3)
    pair = Pair(smollm2_path, threads=2, max_num_batched_tokens=32, num_kv_blocks=64)
    for name, prompt in (("a", 40), ("b", 25), ("c", 90)):
        pair.add(name, rng.integers(0, 49152, prompt + 8).tolist(), prompt)
    pair.step([("a", 30)], [29])
    pair.step([("a", 10), ("b", 20)], [0, 9])
    pair.step([("a", 1), ("b", 5)], [0, 5])
    pair.step([("a", 1), ("b", 1), ("c", 90)], [0, 1, 91])
    for _ in range(5):
        pair.step([("a", 1), ("b", 1), ("c", 1)])
    pair.step([("b", 1)])
    assert pair.replays == [False, True, True, False, *[True] * 6]
    program = pair.executors[0].runner._replayer._recording.program
    assert program.num_fused == 3 * 30 + 1  # two norms and the gated activation of each layer, the last norm


def test_rows_of_an_operand_are_refused(tiny, caplog):
    """Some rows of an array, or every other one: replayed, the operation would run on all of them."""
    for rows in (slice(0, 1), slice(None, None, 2)):
        executor = harness.load(tiny["llama, 4-bit"], backend="cpu")
        sequences = harness.Sequences(executor)
        sequences.add("a", list(range(100)))
        model, ops = executor.runner.model, executor.ops
        forward, weight = model.forward, ops.pack_vector(np.ones(64, np.float32))
        model.forward = lambda batch, rows=rows, ops=ops, forward=forward, weight=weight: (
            out := forward(batch),
            ops.rms_norm(out[rows], weight, 1e-5),
        )[0]
        caplog.clear()
        with caplog.at_level(logging.WARNING, "octavo"):
            for count in (4, 4):
                _, batch = sequences.batch([("a", count)])
                ops.begin_step(count)
                assert executor.runner.forward(batch)[1] is False
        assert len(caplog.records) == 1 and "rms_norm: an operand" in caplog.text


FAULTS = {
    "token id too large": ("token_ids", 10**6),
    "token id negative": ("token_ids", -1),
    "slot outside the pool": ("slot_mapping", 10**6),
    "slot negative": ("slot_mapping", -1),
    "position beyond the table": ("positions", 10**6),
    "position out of order": ("positions", 0),
    "block outside the pool": ("block_tables", 10**6),
    "start beyond the rows": ("query_start_loc", 99),
    "logits of a row there is not": ("logits_rows", 99),
    "num_generated": ("num_generated", 99),
    "num_generated_logits": ("num_generated_logits", -1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_raise_the_same_error(tiny, fault):
    """... as the same op called by itself; and the next good batch has the right bits."""
    name, value = FAULTS[fault]
    pair = Pair(tiny["llama, 4-bit"], threads=2)
    pair.add("a", list(range(100)), 100)
    pair.step([("a", 5)])
    errors = []
    for executor, sequences in zip(pair.executors, pair.sequences, strict=True):
        _, batch = sequences.batch([("a", 4)])
        target = getattr(batch, name)
        array = target[0] if isinstance(target, tuple) else target
        if isinstance(array, int):
            setattr(batch, name, value)
        else:
            array[(0,) * (array.ndim - 1) + (array.shape[-1] - 1 if name != "block_tables" else 0,)] = value
        executor.ops.begin_step(batch.num_rows)
        with pytest.raises((IndexError, ValueError)) as error:
            executor.runner.forward(batch)
        errors.append((type(error.value), str(error.value)))
        sequences.done["a"] = 5  # the same tokens once more, this time as they should be
    assert errors[0] == errors[1]
    pair.step([("a", 4)])
    assert pair.replays == [False, True]


@pytest.mark.parametrize("name", ["token_ids", "positions", "slot_mapping", "block_tables", "query_start_loc", "logits_rows"])
def test_wrong_types_are_refused(tiny, name):
    """Reinterpreted, a wide or strided array would send reads beyond its end."""
    pair = Pair(tiny["llama, 4-bit"])
    pair.add("a", list(range(100)), 100)
    pair.step([("a", 5)])
    _, batch = pair.sequences[0].batch([("a", 4)])
    target = getattr(batch, name)
    setattr(batch, name, (target[0].astype(np.float32),) if isinstance(target, tuple) else target.astype(np.float32))
    pair.executors[0].ops.begin_step(4)
    with pytest.raises(TypeError):
        pair.executors[0].runner.forward(batch)


def test_more_rows_than_the_arena_holds_are_refused(tiny):
    """A caller who forgets begin_step must not get memory that is not the arena's."""
    pair = Pair(tiny["llama, 4-bit"], max_num_batched_tokens=8)
    pair.add("a", list(range(100)), 100)
    pair.step([("a", 5)])
    _, batch = pair.sequences[0].batch([("a", 9)])
    with pytest.raises(ValueError, match="more rows"):
        pair.executors[0].runner.forward(batch)


def test_an_interrupt_stops_a_replay_between_two_ops(smollm2_path):
    """Ctrl-C need not wait for the end of a long step; threads and recording are whole afterwards."""
    pair = Pair(smollm2_path, threads=2, num_kv_blocks=64)
    pair.add("a", np.random.default_rng(1).integers(0, 49152, 600).tolist(), 600)
    pair.step([("a", 2)])
    executor, sequences = pair.executors[0], pair.sequences[0]
    for count in (1, 500):
        _, batch = sequences.batch([("a", count)])
        batch.logits_rows = np.array([count - 1], np.int32)
        executor.ops.begin_step(count)
        if count == 1:
            logits, replayed = executor.runner.forward(batch)
            assert replayed
            logits.fill(np.nan)  # the next replay writes to the same place

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            executor.runner.forward(batch)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert np.isnan(logits).all()  # it ended before the last op
    sequences.done["a"] = 2
    pair.step([("a", 3)])
    assert pair.replays == [False, True]


def test_what_cannot_be_recorded_stays_eager_and_says_so_once(tiny, caplog):
    executor = harness.load(tiny["llama, 4-bit"], backend="cpu")
    sequences = harness.Sequences(executor)
    sequences.add("a", list(range(100)))
    model, ops = executor.runner.model, executor.ops
    forward = model.forward
    model.forward = lambda batch: ops.take_rows(forward(batch), np.arange(len(batch.logits_rows), dtype=np.int32))
    with caplog.at_level(logging.WARNING, "octavo"):
        for count in (3, 2, 1):
            _, batch = sequences.batch([("a", count)])
            ops.begin_step(count)
            assert executor.runner.forward(batch)[1] is False
    assert [r.getMessage() for r in caplog.records] == [
        "steps run eagerly, they cannot be recorded: take_rows: rows is not an array of the batch"
    ]


def test_an_unknown_op_stays_eager(tiny, caplog):
    """An op of the native context that programs do not know yet."""
    executor = harness.load(tiny["llama, 4-bit"], backend="cpu")
    sequences = harness.Sequences(executor)
    sequences.add("a", list(range(100)))
    model, ops, (kv,) = executor.runner.model, executor.ops, executor.runner.kv
    forward = model.forward

    def with_copy(batch):
        ops.copy_blocks(kv, [200], [201])
        return forward(batch)

    model.forward = with_copy
    _, batch = sequences.batch([("a", 3)])
    ops.begin_step(3)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert not any(executor.runner.forward(batch)[1] for _ in range(2))
    assert len(caplog.records) == 1 and "copy_blocks is not among the operations" in caplog.text


def test_taps_see_every_layer_although_steps_are_replayed(tiny):
    """Reading a layer forces the eager path, with the same numbers."""
    pair = Pair(tiny["llama, 4-bit"])
    pair.add("a", list(range(100)), 100)
    for _ in range(2):
        pair.step([("a", 5)])
    names = frozenset({"embed", "layers.0.attn", "layers.1", "norm"})
    values = []
    for sequences in pair.sequences:
        taps = Taps(names)
        sequences.step([("a", 4)], taps)
        values.append(taps.values)
    assert set(values[0]) == names
    for name in names:
        np.testing.assert_array_equal(values[0][name], values[1][name])
    pair.step([("a", 5)])
    assert pair.replays == [False, True, True]


@pytest.mark.parametrize("backend", ["reference", "mixed"])
def test_other_backends_run_eagerly(tiny, backend, caplog):
    kind = {"backend": "reference"} if backend == "reference" else {"backend": "cpu", "op_backends": "silu_mul=reference"}
    with caplog.at_level(logging.INFO, "octavo"):
        executor = harness.load(tiny["llama, 4-bit"], **kind)
    assert ("steps run eagerly: with ops of cpu and reference" in caplog.text) == (backend == "mixed")
    sequences = harness.Sequences(executor)
    sequences.add("a", [1, 2, 3, 4])
    for _ in range(2):
        _, batch = sequences.batch([("a", 2)])
        executor.ops.begin_step(2)
        assert executor.runner.forward(batch)[1] is False
