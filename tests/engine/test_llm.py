"""LLM around a fake model: batches, streams, chats, interrupts, several callers at once."""

from __future__ import annotations

import threading

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.wiring import make_config
from tests.engine.fake import EOS, FakeExecutor, FakeTemplate, FakeTokenizer
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_llm(num_blocks: int = 100, **settings) -> LLM:
    return LLM.from_parts(
        FakeExecutor(num_blocks),
        FakeTokenizer(),
        chat_template=FakeTemplate(),
        eos_token_ids=frozenset({EOS}),
        config=EngineConfig(**settings),
    )


def alone(prompt, params=GREEDY) -> str:
    return make_llm().generate(prompt, params)[0].outputs[0].text


def test_one_prompt_or_many_in_any_form():
    llm = make_llm()
    one = llm.generate("abc", GREEDY)
    assert len(one) == 1 and one[0].prompt == "abc" and one[0].prompt_token_ids == [5, 6, 7] and one[0].finished
    assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].text == one[0].outputs[0].text
    many = llm.generate(["abc", [5, 6], "x"], [GREEDY, SamplingParams(max_tokens=1), GREEDY])
    assert [o.prompt for o in many] == ["abc", None, "x"]
    assert [len(o.outputs[0].token_ids) for o in many] == [8, 1, 8]
    assert llm.generate([], GREEDY) == []
    assert llm.stats().blocks_used == 0


@pytest.mark.parametrize("prompts", [["a", 1], [1, "a"], b"abc", {"a": 1}, 5, ["a", ""], [[1], []], ["ok", [99]], [[1, True]], [[[1]]]])
def test_a_bad_prompt_stops_the_batch_before_anything_runs(prompts):  # E10, E11
    llm = make_llm()
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, GREEDY)
    assert llm.stats().requests_added == 0
    assert llm.generate("abc", GREEDY)[0].outputs[0].text == alone("abc")


def test_numbers_of_params_must_match():
    with pytest.raises(InvalidRequestError, match="2 entries for 3 prompts"):
        make_llm().generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_a_batch_larger_than_the_queue_is_fed_in_parts():
    llm = make_llm(max_waiting_requests=3, max_num_seqs=2)
    seen = []
    outputs = llm.generate([[5 + i % 20] for i in range(40)], GREEDY, progress=lambda done, total: seen.append((done, total)))
    assert [o.prompt_token_ids for o in outputs] == [[5 + i % 20] for i in range(40)]
    assert seen == [(i + 1, 40) for i in range(40)]


def test_a_stream_joined_is_the_whole_reply():  # promise 3
    llm = make_llm()
    params = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=12, ignore_eos=True, stop=["zz"], logprobs=0)
    whole = llm.generate("abc", params)[0]
    for index in (0, 1):
        deltas = [d for d in llm.stream("abc", params) if d.index == index]
        assert "".join(d.text for d in deltas) == whole.outputs[index].text
        assert [t for d in deltas for t in d.token_ids] == whole.outputs[index].token_ids
        assert [d.finish_reason for d in deltas][-1] == whole.outputs[index].finish_reason


def test_closing_a_stream_aborts_it():
    llm = make_llm()
    stream = llm.stream("abc", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream), next(stream)
    stream.close()
    assert llm.stats().requests_aborted == 1 and llm.stats().blocks_used == 0
    with pytest.raises(InvalidRequestError):
        llm.stream("", GREEDY)  # at once, not when it is first read


def test_a_batch_in_steps_is_the_whole_reply():
    llm, prompts = make_llm(), ["abc", [5, 6], "x"]
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), GREEDY]
    tokens, ends, most = [[], [], []], [0, 0, 0], 0
    for step in llm.stream_batch(prompts, params):
        assert step
        most = max(most, len(step))
        for number, delta in step:
            tokens[number] += delta.token_ids
            ends[number] += delta.finish_reason is not None
    assert tokens == [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert ends == [1, 1, 1] and most == 3  # they did run together
    with pytest.raises(InvalidRequestError):
        llm.stream_batch(["ok", [99]])
    stream = llm.stream_batch(prompts, params)
    next(stream)
    stream.close()
    assert llm.stats().blocks_used == 0 and list(llm.stream_batch([])) == []


def test_streams_and_batches_may_interleave():
    llm = make_llm()
    one, two = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    text = {"one": next(one).text, "two": next(two).text}
    assert llm.generate("mno", GREEDY)[0].outputs[0].text == alone("mno")
    text["one"] += "".join(d.text for d in one)
    text["two"] += "".join(d.text for d in two)
    assert text == {"one": alone("abc"), "two": alone("xyz")}


def test_threads_share_one_model():
    llm, found = make_llm(num_blocks=12, max_num_seqs=3), {}

    def work(prompt):
        found[prompt] = llm.generate(prompt, GREEDY)[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in ("abc", "bcd", "cde", "def")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {prompt: alone(prompt) for prompt in ("abc", "bcd", "cde", "def")}


def test_chat_one_conversation_or_many():
    llm = make_llm()
    first, second = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "yo"}]
    one = llm.chat(first, GREEDY)
    assert one[0].prompt_token_ids == FakeTokenizer().encode("uhia")
    both = llm.chat([first, second], GREEDY)
    assert both[0].outputs[0].text == one[0].outputs[0].text
    assert "".join(d.text for d in llm.stream_chat(second, GREEDY)) == both[1].outputs[0].text


def test_an_interrupt_aborts_what_runs_and_the_model_stays_usable():
    llm = make_llm()

    def interrupt(output):
        if output.step == 3:
            raise KeyboardInterrupt

    llm.executor.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], GREEDY)
    llm.executor.before_step = lambda output: None
    assert llm.generate("abc", GREEDY)[0].outputs[0].text == alone("abc")
    assert llm.stats().requests_aborted == 2 and llm.stats().blocks_used == 0


def test_a_dead_engine_fails_every_caller():
    llm = make_llm()
    stream = llm.stream("abc", GREEDY)
    next(stream)

    def fail(output):
        raise RuntimeError("broken")

    llm.executor.before_step = fail
    with pytest.raises(EngineDeadError):
        llm.generate("abc", GREEDY)
    with pytest.raises(EngineDeadError):
        next(stream)


def test_closing():
    with make_llm() as llm:
        stream = llm.stream("abc", GREEDY)
        next(stream)
    llm.close()
    assert llm.executor.closed
    with pytest.raises(EngineDeadError):
        next(stream)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("abc", GREEDY)


def test_events_and_priorities():
    llm = make_llm(max_num_seqs=1)
    finished = []
    llm.generate(["a", "b", "c"], GREEDY, priority=[2, 1, 0])
    for event in llm.events():
        finished += event.finished
    assert finished == ["request-2", "request-1", "request-0"]
    assert llm.events(1)[0].step == llm.stats().steps


def test_settings_are_those_of_engine_config():
    assert make_config(None, None, {}).model == "smollm2"
    assert make_config("m", EngineConfig(block_size=8), {"threads": 2}) == EngineConfig(model="m", block_size=8, threads=2)
    with pytest.raises(ConfigError, match="unknown setting 'temprature'"):
        LLM("smollm2", temprature=0)
    with pytest.raises(ConfigError, match="block_size"):
        LLM("smollm2", block_size=0)


def test_loading_reports_its_progress_and_the_models_defaults(tmp_path):
    tiny = write_tiny(tmp_path, generation_config={"do_sample": True, "temperature": 0.3})
    seen: list[tuple[str, int, int]] = []
    settings = {"backend": "reference", "num_kv_blocks": 4, "max_model_len": 32}
    with LLM(str(tiny.path), load_progress=lambda *report: seen.append(report), **settings) as llm:
        assert llm.generation_defaults == {"temperature": 0.3}
    assert {stage for stage, _, _ in seen} == {"load"} and len(seen) > 3
    assert seen == sorted(seen) and seen[-1][1] == seen[-1][2] > 0 and len({total for _, _, total in seen}) == 1


def test_a_download_reports_its_progress(monkeypatch):
    def fetch(model, *, revision, progress):
        progress(3, 9)
        raise ModelLoadError("stop here")

    monkeypatch.setattr("octavo.loading.source.resolve_source", fetch)
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(ModelLoadError, match="stop here"):
        LLM("some/model", load_progress=lambda *report: seen.append(report))
    assert seen == [("download", 3, 9)]
