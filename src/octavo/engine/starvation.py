"""StarvationBound: how many requests may run at once so that each gets something in time.

With S = max_stalled_steps, B = max_num_batched_tokens, D = max_decode_batch_size:
- a running request gets nothing for at most S steps in a row. For that, at most S * min(D - 1, B - B // 2) requests run
  (what is sure to be served beside a starved prefill), so the round robin comes around in time;
- the same holds for half-done prefills and for the first place in the queue, whoever stands there, as long as a sequence, its
  blocks and a prefill place are free (at most S prefills are half done at a time). How long a request may be overtaken
  before it stands there: policies.py. One starved prefill is served a step, and with
  K of them each is called starved K - 1 steps early, so that the last one is still in time.
Where a step can hold a single decode (B or D is 1), starved prefills take every other step only; S is then at least 4.

Owner: the scheduler, which keeps to it. Not here: serving the starved (scheduler.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from octavo.config import EngineConfig

_log = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class StarvationBound:
    #: Steps in a row that may pass a request by.
    steps: int
    #: A starved prefill may go first in every step, or in every other one where it would take the only place.
    period: int
    max_running: int
    #: Prefills that may be half done at a time.
    max_prefills: int

    @classmethod
    def of(cls, config: EngineConfig) -> StarvationBound:
        """The bound of a configuration; warns where it is not the one asked for."""
        budget, decodes = config.max_num_batched_tokens, config.max_decode_batch_size
        period = 2 if min(budget, decodes) == 1 else 1
        steps = max(config.max_stalled_steps, 2 * period if period > 1 else 1)
        sure = steps // 2 if period > 1 else steps * min(decodes - 1, budget - budget // 2)
        bound = cls(steps, period, min(config.max_num_seqs, sure), max(1, (steps + 1) // period - 1))
        if bound.max_running < config.max_num_seqs or steps > config.max_stalled_steps:
            _log.warning(
                "to keep the starvation bound with steps of %d tokens and %d decodes: at most %d sequences run at once, "
                "and none gets nothing for more than %d steps",
                budget,
                decodes,
                bound.max_running,
                steps,
            )
        return bound

    def is_starved(self, stalled: int, num_candidates: int) -> bool:
        """Whether the one of so many candidates that has waited longest, `stalled` steps, must be served now."""
        return stalled >= self.steps + 1 - self.period * num_candidates
