"""The in-process benchmark: rates against steps of known duration, and against an engine around a fake model."""

import types

import pytest

from octavo.bench.latency import Case, cases, check, measure
from octavo.config import EngineConfig
from octavo.engine.events import EntryEvent, StepEvent
from octavo.engine.metrics import EngineStats
from octavo.errors import ConfigError, OctavoError
from octavo.llm import LLM
from tests.engine.fake import EOS, FakeExecutor, FakeTokenizer


class TimedLLM:
    """Leaves the events of a batch whose steps take exactly so long: prompts 0.2 s, mixed 0.15 s, generation 0.01 s."""

    def __init__(self, steps_left_out=0):
        self.config, self.max_model_len = EngineConfig(), 100_000
        self.executor = types.SimpleNamespace(info=types.SimpleNamespace(vocab_size=5000))
        self.steps, self.prompts, self.left_out = [], [], steps_left_out

    def generate(self, prompts, params, progress):
        assert params.ignore_eos and params.temperature == 0 and progress is False
        self.prompts += prompts
        ids = [str(number) for number in range(len(prompts))]
        last = ids[-1]
        if params.max_tokens == 1:
            return self._add(0.2, [(one, len(prompts[0])) for one in ids])
        if len(ids) > 1:
            self._add(0.2, [(one, len(prompts[0])) for one in ids[:-1]])
            self._add(0.15, [(last, len(prompts[0])), *((one, 1) for one in ids[:-1])])
        else:
            self._add(0.2, [(last, len(prompts[0]))])
        for _ in range(params.max_tokens - 2):
            self._add(0.01, [(one, 1) for one in ids])
        return self._add(0.008, [(last, 1)])

    def _add(self, seconds, entries):
        timings = {"schedule": 0.1 * seconds, "execute": 0.7 * seconds, "update": 0.2 * seconds}
        timings |= {"prepare": 0.1 * seconds, "forward": 0.4 * seconds, "sample": 0.1 * seconds}
        event = StepEvent(len(self.steps), 0.0, [EntryEvent(i, 0, n, 0, "decode") for i, n in entries], timings=timings)
        self.steps.append(event)

    def stats(self):
        return EngineStats(steps=len(self.steps), blocks_total=10**9)

    def events(self, count):
        return self.steps[len(self.steps) - count + self.left_out :]


def test_rates_count_only_the_steps_they_are_about():
    llm, case = TimedLLM(), Case(512, 20, 4)
    found = measure(llm, [case], rounds=3)[case]
    assert found.prefill == pytest.approx([4 * 512 / 0.2] * 3)
    # neither the step with a prompt in it nor the last one, in which only one request was left
    assert found.decode == pytest.approx([4 / 0.01] * 3) and len(found.total) == 3
    figures = found.figures(breakdown=True)
    assert figures["decode_tokens_per_s"] == {"median": 400.0, "min": 400.0, "max": 400.0, "runs": [400.0] * 3}
    wanted = {"schedule": 1.0, "prepare": 1.0, "forward": 4.0, "sample": 1.0, "update": 2.0, "other": 1.0, "step": 10.0}
    assert figures["decode_step_ms"] == pytest.approx(wanted)
    assert figures["prefill_step_ms"] == pytest.approx({part: 20 * ms for part, ms in wanted.items()})
    assert "decode_step_ms" not in found.figures()


def test_prompts_are_random_and_no_two_begin_alike():
    llm = TimedLLM()
    measure(llm, [Case(30, 3, 5)], rounds=2)
    assert len(llm.prompts) == 2 * 5 * 3 and {len(prompt) for prompt in llm.prompts} == {30}
    assert len({tuple(prompt[:4]) for prompt in llm.prompts}) == 30
    assert all(0 <= token < 5000 for prompt in llm.prompts for token in prompt)


def test_rounds_are_interleaved_and_the_first_does_not_count():
    llm, order = TimedLLM(), []
    wanted = [Case(3, 1, 1), Case(5, 1, 1)]
    found = measure(llm, wanted, rounds=2, done=lambda: order.append(len(llm.prompts[-1])))
    assert order == [3, 5] * 3 and [len(result.prefill) for result in found.values()] == [2, 2]
    assert not found[wanted[0]].decode and "decode_tokens_per_s" not in found[wanted[0]].figures()


def test_events_that_are_missing_are_an_error():
    with pytest.raises(ConfigError, match="--event-history"):
        measure(TimedLLM(steps_left_out=1), [Case(3, 4, 1)], rounds=1)


def test_a_case_without_a_full_step_is_an_error():
    with pytest.raises(OctavoError, match="generate more tokens"):
        measure(TimedLLM(), [Case(3, 2, 3)], rounds=1)


def test_on_an_engine_around_a_fake_model():
    llm = LLM.from_parts(FakeExecutor(400), FakeTokenizer(), eos_token_ids=frozenset({EOS}), config=EngineConfig())
    found = measure(llm, cases([7, 20], [6], [1, 3]), rounds=2)
    assert len(found) == 4 and all(len(r.prefill) == len(r.decode) == 2 and min(r.prefill + r.decode) > 0 for r in found.values())
    # three rounds, each with every case's prompts twice, and no prefix shared
    stats = llm.stats()
    assert stats.requests_finished == 3 * 2 * (1 + 3) * 2 and stats.blocks_used == 0
    with pytest.raises(ConfigError, match="longer than"):
        check(llm, [Case(llm.max_model_len, 1, 1)])
