"""The turns of a real chat: what the next one finds in the cache, with and without `reuse_generated`, by counters."""

from __future__ import annotations

from os.path import commonprefix

import pytest

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("smollm2_path")
QUESTIONS = ("Hi", "Why?", "Go on.")
ANSWER = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def turns(**settings) -> list[tuple[list[int], list[int], int]]:
    """Of each turn: the ids of its prompt and of its answer, and how many of its prompt were cached."""
    messages: list[dict[str, str]] = []
    found = []
    with LLM("smollm2", num_kv_blocks=64, **settings) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            before = llm.stats().prefix_hit_tokens
            output = llm.chat(messages, ANSWER, progress=False)[0]
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            found.append((output.prompt_token_ids, output.outputs[0].token_ids, llm.stats().prefix_hit_tokens - before))
    return found


def test_the_next_turn_computes_the_last_answer_and_the_question_and_no_more():
    default, cold = turns(), turns(enable_prefix_caching=False)
    assert [answer for _, answer, _ in default] == [answer for _, answer, _ in cold]  # a hit changes nothing
    assert [cached for _, _, cached in cold] == [0] * len(QUESTIONS) and default[0][2] == 0
    for (before, _, _), (_, _, cached) in zip(default, default[1:], strict=False):
        assert cached == len(before) // 16 * 16


def test_with_reuse_generated_it_computes_the_question():
    reused = turns(reuse_generated=True)
    answers_hit = 0
    for (before, answer, _), (prompt, _, cached) in zip(reused, reused[1:], strict=False):
        computed = [*before, *answer[:-1]]  # the last token of an answer is never computed
        same = len(commonprefix([computed, prompt]))  # a text may be tokenised in another way than it was generated
        assert cached == same // 16 * 16
        answers_hit += cached > len(before) // 16 * 16
    assert answers_hit > 0
