"""Running models under bad treatment: interrupts anywhere, streams dropped anywhere, threads, forks, numbers that overflow.

Tiny models on the native kernels (the reference where they are not built). The right outcome is always the same: what was
not hurt has exactly the bits it has alone, every block comes back, and the same LLM goes on.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import octavo
from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequestError
from octavo.outputs import RequestOutput
from tests.tiny_models import write_tiny

SOURCE = Path(octavo.__file__).parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m").path


def load(path: Path, **settings) -> LLM:
    return LLM(str(path), **{"num_kv_blocks": 12, "threads": 2, "max_num_batched_tokens": 40, **settings})


def exact(output: RequestOutput) -> list:
    return [(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason, c.error) for c in output.outputs]


def mixed(seed: int = 0, count: int = 6) -> tuple[list[list[int]], list[SamplingParams]]:
    """Shared prefixes, forks, penalties, stop strings: in a pool of 12 blocks some are preempted."""
    rng = random.Random(seed)
    prefix = [rng.randrange(256) for _ in range(20)]
    prompts = [prefix[: rng.choice([0, 16, 20])] + [rng.randrange(256) for _ in range(rng.randrange(1, 30))] for _ in range(count)]
    params = [
        SamplingParams(
            n=rng.choice([1, 1, 3]),
            temperature=rng.choice([0, 0.9]),
            seed=i,
            max_tokens=rng.randrange(1, 30),
            stop=rng.choice([(), ("a",)]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            logprobs=1,
            ignore_eos=True,
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        for i in range(count)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def alone(tiny) -> list:
    llm = load(tiny, num_kv_blocks=100, enable_prefix_caching=False)
    return [exact(llm.generate([prompt], params)[0]) for prompt, params in zip(*mixed(), strict=True)]


def at_rest(llm: LLM) -> None:
    assert not llm._core._requests and not llm._mail
    stats = llm.stats()
    assert stats.blocks_used == stats.running == stats.waiting == stats.holding == 0
    llm._core.check_invariants()


# -- interrupts --------------------------------------------------------------------------------------------------------
def profiled(call: Callable[[], object], act: Callable[[int], None]) -> list[tuple[str, str]]:
    """Run `call`; at the i-th call or return of a Python function of llm.py or engine/, `act(i)`. Returns those functions."""
    seen: list[tuple[str, str]] = []
    ours: dict[object, bool] = {}

    def profile(frame, event, argument) -> None:
        code = frame.f_code
        if code not in ours:
            path = Path(code.co_filename)
            ours[code] = path.is_relative_to(SOURCE) and (path.parent.name == "engine" or path.name == "llm.py")
        if ours[code] and event in ("call", "return"):
            seen.append((code.co_qualname, event))
            act(len(seen) - 1)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_an_interrupt_at_any_point_loses_nothing_but_what_it_interrupts(tiny, alone):
    """Ctrl-C at the entry and the exit of every function of the engine, and at each one around the end of a stream that is
    half read beside it: the stream gets its end, nothing is left behind, and the next answers are right."""
    llm = load(tiny)
    prompts, params = mixed()
    work = prompts[:3], params[:3]
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def beside(act: Callable[[int], None]) -> list[tuple[str, str]]:
        """An answer with a stream begun before it, which ends in the third of its steps."""
        stream = llm.stream([1, 2, 3], short)
        deltas = [next(stream)]
        events = []
        try:
            events = profiled(lambda: llm.generate(*work), act)
        finally:
            deltas += stream
            assert deltas[-1].finish_reason in ("abort", "length")
            at_rest(llm)
        return events

    beside(lambda i: None)  # the first time more is called: the step is recorded, and nothing is found in the cache
    events = beside(lambda i: None)
    end = events.index(("OutputProcessor.close", "call"))
    moments = sorted({*map(events.index, dict.fromkeys(events)), *range(end - 20, end + 60)})
    assert len(moments) > 200
    interrupted = unreached = 0
    for count, moment in enumerate(moments):
        interrupt = {moment: lambda: signal.raise_signal(signal.SIGINT)}
        try:
            beside(lambda i, at=interrupt: at.pop(i, lambda: None)())
        except KeyboardInterrupt:
            interrupted += 1
        unreached += bool(interrupt)  # a run has a few calls more or less, by what the one before has left in the cache
        if count % 20 == 0:
            assert [exact(output) for output in llm.generate(*work)] == alone[:3], events[moment]
    assert interrupted == len(moments) - unreached and unreached <= 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_callers_own_is_called_once_and_stays(tiny):
    llm = load(tiny)
    calls = []

    def own(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        profiled(
            lambda: llm.generate([1, 2], SamplingParams(max_tokens=3)), lambda i: signal.raise_signal(signal.SIGINT) if i == 40 else None
        )
        assert calls == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


# -- streams that go away ----------------------------------------------------------------------------------------------
def test_a_stream_collected_in_the_middle_of_a_step(tiny, alone):
    """The garbage collector closes a forgotten stream wherever it happens to run: in the middle of scheduling, say."""
    llm = load(tiny, num_kv_blocks=60)
    work = mixed()
    victims = [llm.stream([i, 9], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)) for i in range(3)]
    for victim in victims:
        next(victim)
    allocate = llm._core.kv.allocate_slots

    def collecting(request, *args, **kwargs):
        if request.request_id not in ("request-0", "request-1", "request-2") and victims:
            victims.pop().close()
        return allocate(request, *args, **kwargs)

    llm._core.kv.allocate_slots = collecting
    assert [exact(output) for output in llm.generate(*work)] == alone
    assert not victims
    at_rest(llm)


def test_a_step_cannot_be_entered_twice(tiny):
    llm = load(tiny)
    found: list[BaseException] = []
    allocate = llm._core.kv.allocate_slots

    def nested(*args, **kwargs):
        if not found:
            try:
                llm.generate([1], SamplingParams(max_tokens=1))
            except InvalidRequestError as error:
                found.append(error)
        return allocate(*args, **kwargs)

    llm._core.kv.allocate_slots = nested
    assert llm.generate([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].finish_reason == "length"
    assert "inside its own step" in str(found[0])
    at_rest(llm)


def test_streams_closed_read_and_dropped_in_any_order(tiny, alone):
    llm = load(tiny)
    rng = random.Random(1)
    for _ in range(30):
        streams = [
            llm.stream(
                [rng.randrange(256) for _ in range(rng.randrange(1, 40))], SamplingParams(n=rng.choice([1, 2]), max_tokens=20, seed=1)
            )
            for _ in range(rng.randrange(1, 5))
        ]
        for stream in streams:
            for _ in range(rng.randrange(5)):
                next(stream, None)
        rng.shuffle(streams)
        for stream in streams[::2]:
            stream.close()
        del streams, stream
        gc.collect()
        at_rest(llm)
    assert [exact(output) for output in llm.generate(*mixed())] == alone


# -- threads and processes ---------------------------------------------------------------------------------------------
def test_threads_share_two_models(tiny, alone):
    models = [load(tiny), load(tiny)]
    prompts, params = mixed()
    wrong = []

    def run(llm: LLM, offset: int) -> None:
        for i in range(len(prompts)):
            k = (i + offset) % len(prompts)
            if exact(llm.generate([prompts[k]], params[k])[0]) != alone[k]:
                wrong.append((offset, k))

    threads = [threading.Thread(target=run, args=(models[i % 2], i)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for llm in models:
        at_rest(llm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_answers_the_same(tiny, alone):
    """The native threads do not exist in a child; it computes on one."""
    llm = load(tiny)
    assert [exact(output) for output in llm.generate(*mixed())] == alone
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int([exact(output) for output in llm.generate(*mixed())] != alone)
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0
    assert [exact(output) for output in llm.generate(*mixed())] == alone


# -- numbers that are none ---------------------------------------------------------------------------------------------
def poisoned(source: Path, target: Path, value: float) -> Path:
    """The same model, with token 65's embedding all `value`."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, target)
    weights = {name: array.copy() for name, array in load_file(source / "model.safetensors").items()}
    weights["model.embed_tokens.weight"][65] = value
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("kv_dtype", ["auto", "f16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
def test_overflow_ends_its_own_request_only(tiny, tmp_path, backend, value, kv_dtype):  # F18
    """3e38 is finite, but its square is not: RMSNorm would make zeros of the row, and an answer of them. Blocks that held
    NaN are used again by others, half filled."""
    if backend == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    settings = {"backend": backend, "kv_dtype": kv_dtype}
    path = poisoned(tiny, tmp_path / "p", value)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, logprobs=2, ignore_eos=True, logit_bias={65: -100})
    good = [[66, 67, 68], [70] * 17, [71, 72], [73] * 31]
    bad = [[65], [66, 65, 67], [66] * 15 + [65], [66] * 20 + [65] * 20]
    solo = load(path, num_kv_blocks=100, enable_prefix_caching=False, **settings)
    expected = [exact(solo.generate([prompt], params)[0]) for prompt in good]
    assert all(choice[0][4] == "length" for choice in expected)
    llm = load(path, **settings)
    for _ in range(3):
        outputs = llm.generate([prompt for pair in zip(bad, good, strict=True) for prompt in pair], params)
        for output in outputs[::2]:
            assert output.outputs[0].finish_reason == "error" and "not finite" in output.outputs[0].error
        if llm.executor.ops.name == "cpu":  # the others promise closeness only
            assert [exact(output) for output in outputs[1::2]] == expected
        assert all(output.outputs[0].finish_reason == "length" for output in outputs[1::2])
    prompt_only = llm.generate([[65, 66], [70, 71]], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert [output.outputs[0].finish_reason for output in prompt_only] == ["error", "length"]
    forked = llm.generate([65, 66], SamplingParams(n=2, max_tokens=3))[0]
    assert [choice.finish_reason for choice in forked.outputs] == ["error", "error"]
    at_rest(llm)


# -- conversations that are none ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("messages", [None, 5, "x", b"x", {"role": "user", "content": "a"}, [], [None], ["x"], [5], [[]], [[], 5], [{}]])
def test_messages_of_any_shape_are_refused(tiny, messages):
    with pytest.raises(InvalidRequestError):
        load(tiny).chat(messages, SamplingParams(max_tokens=1))
