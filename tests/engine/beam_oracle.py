"""Beam search over the model of hashes by its definition: no blocks, no batches, no requests."""

from __future__ import annotations

from octavo.engine.request import EngineRequest
from tests.engine.fake import digests, distribution


def plain_search(order: EngineRequest, max_tokens: int, identity: str | None = None, kinds: bool = True) -> list[tuple[list[int], float]]:
    """The n best (tokens, cumulative logprob). Every continuation of every beam is looked at; nothing is kept between steps.

    `identity`, `kinds`: of the executor, as in `reference_run`.
    """
    prompt, params, stops = list(order.prompt_token_ids), order.sampling_params, order.stop_token_ids
    width, running, ended = params.beam_width, [([], 0.0)], []

    def score(one):
        return one[1] / len(one[0]) ** params.length_penalty

    while True:
        found = []
        for tokens, total in running:
            values = distribution(digests(prompt + tokens, len(prompt), identity, kinds=kinds)[-1])
            found += [([*tokens, t], total + v) for t, v in enumerate(values) if t not in stops or len(tokens) >= params.min_tokens]
        found.sort(key=lambda one: -one[1])
        over = [len(one[0]) == max_tokens or one[0][-1] in stops for one in found]
        ended += [one for one, is_over in zip(found[:width], over, strict=False) if is_over]
        ended = sorted(ended, key=score, reverse=True)[:width]
        running = [one for one, is_over in zip(found, over, strict=True) if not is_over][:width]
        if not running:
            break
        if len(ended) == width:
            never = params.early_stopping == "never" and params.length_penalty > 0
            length = max_tokens if never else len(running[0][0])
            if params.early_stopping is True or running[0][1] / length**params.length_penalty <= score(ended[-1]):
                break
    return ended[: params.n]
