"""A model made of hashes, behind the Executor protocol: fast, no weights, and any mistake with KV changes its answers.

What the fake stores in a slot is a digest of everything the token attends to, read back through the block tables. A
stale, unwritten, wrong or overwritten block therefore changes every later token; and since the fake also knows the
request's tokens, it fails at once instead. It holds the scheduler to the contract of scheduler_output.py.

The answer is a pure function of (prompt, what was generated, parameters, seed, choice): `reference_tokens` computes it
without engine, blocks or batches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.config import EngineConfig
from octavo.engine.engine_core import EngineCore
from octavo.engine.executor import ExecutorInfo, KVGroup
from octavo.engine.request import EngineRequest, max_output_tokens
from octavo.engine.scheduler_output import NewRequest, SampledToken, SchedulerOutput, StepResult, TokenKind
from octavo.outputs import CompletionDelta, Logprob, OutputAccumulator, RequestOutput
from octavo.sampling_params import SamplingParams

EOS, BOS = 0, 31
_PIECES: list[bytes] = [b"<eos>", b"\xf0\x9f", b"\x98\x80", b" ", b"\n", *(bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz"), b"<bos>"]


class FakeTokenizer:
    """One token a letter; two tokens for one emoji."""

    vocab_size = len(_PIECES)
    special_ids = frozenset({EOS, BOS})
    strip_leading_space = False

    def __init__(self, bos_token_id: int | None = None) -> None:
        self.bos_token_id = bos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        data = text.replace("\U0001f600", "\x01\x02").encode()
        ids = [byte if byte in (1, 2) else _PIECES.index(bytes([byte])) for byte in data]
        return [self.bos_token_id, *ids] if add_special_tokens and self.bos_token_id is not None else ids

    def token_bytes(self, token_id: int) -> bytes:
        return _PIECES[token_id]

    def token_text(self, token_id: int) -> str:
        return _PIECES[token_id].decode("utf-8", "backslashreplace")


class FakeTemplate:
    def encode_chat(self, messages, /, *, add_generation_prompt=True, continue_final_message=False, **kwargs):
        text = "".join(message["role"][0] + message["content"] for message in messages)
        return FakeTokenizer().encode(text + ("a" if add_generation_prompt else "") + kwargs.get("suffix", ""))


def _mix(*values: int) -> int:
    return hash(values) & (2**60 - 1)  # of integers only: the same in every process


def digests(tokens: Sequence[int], num_prompt: int, adapter: str | None = None, *, kinds: bool = True) -> list[int]:
    """What the KV of each token must hold. `kinds`: it differs between prompt and generated tokens."""
    found: list[int] = []
    salt = zlib.crc32((adapter or "").encode())
    for position, token in enumerate(tokens):
        found.append(_digest(found, token, TokenKind.GENERATED if kinds and position >= num_prompt else TokenKind.PROMPT, salt))
    return found


def _digest(before: Sequence[int], token: int, kind: TokenKind, salt: int) -> int:
    return _mix(hash(tuple(before)), token, int(kind), salt)


def draw(digest: int, params: SamplingParams, seed: int, choice: int, position: int, stop_ids: frozenset[int], num_outputs: int) -> int:
    """The next token. Greedy: of the digest alone. Otherwise also of (seed, choice, position)."""
    state = digest if params.greedy else _mix(digest, seed, choice, position)
    for _ in range(1000):
        state = _mix(state, 1)
        token = state % FakeTokenizer.vocab_size
        if params.allowed_token_ids is not None:
            token = params.allowed_token_ids[state % len(params.allowed_token_ids)]
        if token not in stop_ids or num_outputs >= params.min_tokens:
            return token
    raise AssertionError("every token is masked")


@dataclass
class _Known:
    new: NewRequest
    tokens: list[int]
    tables: list[list[int]]
    computed: int | None = None
    expected: list[int] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return len(self.new.prompt_token_ids)


class FakeExecutor:
    def __init__(
        self,
        num_blocks: int = 512,
        block_size: int = 4,
        max_model_len: int = 256,
        groups: int = 1,
        script: Callable[[list[int], int], int] | None = None,
        windows: Sequence[tuple[int, int]] = (),
        kinds: bool = True,
    ) -> None:
        """`script`: (prompt, number of tokens generated) -> next token, instead of the hash. `windows`: (sliding window, blocks)
        of further groups, of which a row sees that many slots only. `kinds`: see `digests`."""
        kv_groups = (*(KVGroup(num_blocks, block_size) for _ in range(groups)), *(KVGroup(n, block_size, w) for w, n in windows))
        self.info = ExecutorInfo(kv_groups, FakeTokenizer.vocab_size, max_model_len, (1,) * len(kv_groups))
        self.block_size = block_size
        self.script = script
        self.kinds = kinds
        self.known: dict[str, _Known] = {}
        self.outputs: list[SchedulerOutput] = []
        #: Per group and block: (digest, step it was written in), or None.
        self.pool = [[[None] * block_size for _ in range(group.num_blocks)] for group in kv_groups]
        self.step = 0
        self.before_step: Callable[[SchedulerOutput], None] = lambda output: None
        self.errors: dict[str, str] = {}
        self.closed = False

    def identity(self, new: NewRequest) -> str | None:
        """Requests of different identity compute different KV from the same tokens."""
        return new.adapter

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.step += 1
        self.outputs.append(output)
        self.before_step(output)
        for request_id in output.dropped_request_ids:
            self.known.pop(request_id, None)
        for copy in output.block_copies:
            holders = sum(copy.target in self._visible(known, copy.group) for known in self.known.values())
            assert holders == 0, "a copy would overwrite a block in use"
        sources = [list(self.pool[copy.group][copy.source]) for copy in output.block_copies]
        targets = [(copy.group, copy.target) for copy in output.block_copies]
        assert len(set(targets)) == len(targets) and not set(targets) & {(c.group, c.source) for c in output.block_copies}
        for (group, target), content in zip(targets, sources, strict=True):
            self.pool[group][target] = content
        for new in output.new_requests:
            assert new.request_id not in self.known, "started twice"
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            self.known[new.request_id] = _Known(new, tokens, [[] for _ in self.pool])
        kinds = [entry.kind for entry in output.entries]
        assert kinds == sorted(kinds, reverse=True), "generated rows come first"
        assert len({entry.request_id for entry in output.entries}) == len(kinds), "a request has two entries"
        for entry in output.entries:  # all tables first: blocks must be disjoint where they are written
            for group, blocks in enumerate(entry.new_block_ids):
                self.known[entry.request_id].tables[group].extend(blocks)
        result = StepResult(timings={"forward": 0.0})
        for entry in output.entries:
            self._run_entry(entry, result)
        return result

    def _run_entry(self, entry, result) -> None:
        known = self.known[entry.request_id]
        end = entry.start + entry.num_tokens
        assert entry.num_tokens > 0 and end <= len(known.tokens)
        assert known.computed is None or entry.start == known.computed, "entries are not contiguous"
        if entry.kind is TokenKind.PROMPT:
            assert end <= known.num_prompt
        else:
            assert entry.start >= known.num_prompt
        known.computed = end
        if len(known.expected) < end:
            known.expected = self.digests(known, end)
        values = known.expected[:end]
        for group in range(len(self.pool)):
            self._check_writable(entry, group)
            first = self._first_visible(group, entry.start)
            assert self._read(known, group, first, entry.start) == values[first : entry.start], f"{entry.request_id} reads KV not its own"
            for position in range(entry.start, end):
                block = known.tables[group][position // self.block_size]
                assert block >= 0, "writes behind a window"
                self.pool[group][block][position % self.block_size] = (values[position], self.step)
        self._answer(entry, known, values, result)

    def digests(self, known: _Known, end: int) -> list[int]:
        return digests(known.tokens[:end], known.num_prompt, self.identity(known.new), kinds=self.kinds)

    def _first_visible(self, group: int, position: int) -> int:
        """The first position that a row there sees."""
        window = self.info.kv_groups[group].sliding_window
        return 0 if window is None else max(0, position - window + 1)

    def _visible(self, known: _Known, group: int) -> list[int]:
        """Blocks of a request that a later row of it may read or write."""
        return known.tables[group][self._first_visible(group, known.computed or 0) // self.block_size :]

    def _check_writable(self, entry, group) -> None:
        table = self.known[entry.request_id].tables[group]
        first, last = entry.start // self.block_size, (entry.start + entry.num_tokens - 1) // self.block_size
        assert last < len(table), "the block table is too short"
        written = set(table[first : last + 1])
        for request_id, other in self.known.items():
            assert request_id == entry.request_id or not written & set(self._visible(other, group)), (
                f"{entry.request_id} writes a block of {request_id}"
            )

    def _read(self, known: _Known, group: int, start: int, end: int) -> list[int]:
        values = []
        for position in range(start, end):
            block = known.tables[group][position // self.block_size]
            assert block >= 0, "reads a block behind a window"
            slot = self.pool[group][block][position % self.block_size]
            assert slot is not None, "reads a slot that was never written"
            assert slot[1] < self.step, "reads what another request writes in the same step"
            values.append(slot[0])
        return values

    def _answer(self, entry, known: _Known, values: list[int], result: StepResult) -> None:
        new, params = known.new, known.new.sampling_params
        if params.prompt_logprobs is not None and entry.kind is TokenKind.PROMPT:
            last = min(entry.start + entry.num_tokens, known.num_prompt - 1)
            result.prompt_logprobs[entry.request_id] = [
                {known.tokens[p + 1]: prompt_logprob(values[p], known.tokens[p + 1])} for p in range(entry.start, last)
            ]
        if entry.request_id in self.errors:
            result.errors[entry.request_id] = self.errors[entry.request_id]
            return
        if not entry.sample:
            return
        assert entry.start + entry.num_tokens == len(known.tokens)
        num_outputs = len(known.tokens) - known.num_prompt
        if self.script is not None:
            token = self.script(new.prompt_token_ids, num_outputs)
        else:
            token = draw(values[-1], params, new.seed, new.choice, len(known.tokens), new.stop_token_ids, num_outputs)
        known.tokens.append(token)
        if params.beam_width is not None:
            result.sampled[entry.request_id] = SampledToken(token, proposals(values[-1], params.logprobs))
            return
        logprobs = None if params.logprobs is None else {token: logprob(values[-1]), (token + 1) % 32: Logprob(-9.0, 2)}
        result.sampled[entry.request_id] = SampledToken(token, logprobs)

    def close(self) -> None:
        self.closed = True


def distribution(digest: int) -> list[float]:
    """Log probability of each token after a digest: what beams are ranked by."""
    logits = [_mix(digest, token, 3) % 1000 / 200 for token in range(FakeTokenizer.vocab_size)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def proposals(digest: int, most: int) -> dict[int, Logprob]:
    values = distribution(digest)
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    return {token: Logprob(values[token], rank) for rank, token in enumerate(ranked[:most], start=1)}


def logprob(digest: int) -> Logprob:
    """Of the token drawn after this digest."""
    return Logprob(-(digest % 97) / 10, 1)


def prompt_logprob(digest: int, token: int) -> Logprob:
    return Logprob(-(_mix(digest, token) % 89) / 10, 1)


# Building and running


def make_core(executor: FakeExecutor | None = None, **settings) -> EngineCore:
    """An engine around a fake; settings of FakeExecutor and EngineConfig by name."""
    names = ("num_blocks", "block_size", "max_model_len", "groups", "script", "windows")
    executor = executor or FakeExecutor(**{name: settings.pop(name) for name in names if name in settings})
    return EngineCore(executor, FakeTokenizer(), EngineConfig(**settings))


def request(
    request_id: str, prompt: Sequence[int], *, seed: int = 7, eos: bool = True, info: ExecutorInfo | None = None, **fields
) -> EngineRequest:
    """An EngineRequest as the input processor would make it; sampling fields and EngineRequest fields by name."""
    own = {name: fields.pop(name) for name in ("priority", "cache_salt", "tenant", "adapter") if name in fields}
    fields = {"temperature": 0.0, "max_tokens": 8, **fields}
    params = SamplingParams(**fields).resolve({})
    return EngineRequest(request_id, list(prompt), params, params.max_tokens, seed, frozenset({EOS}) if eos else frozenset(), **own)


def reference_tokens(order: EngineRequest, choice: int = 0, info: ExecutorInfo | None = None) -> list[int]:
    """The ids a choice generates, computed from the definition. Knows eos, stop ids and lengths, not stop strings."""
    return reference_run(order, choice, info, order.adapter)[0]


def reference_run(
    order: EngineRequest, choice: int, info: ExecutorInfo | None, identity: str | None, kinds: bool = True
) -> tuple[list[int], list[int]]:
    """As `reference_tokens`, for an executor with that identity and `kinds`; and what the KV of all tokens holds (but the last's)."""
    params, num_prompt = order.sampling_params, len(order.prompt_token_ids)
    most = order.max_tokens if info is None else min(order.max_tokens, max_output_tokens(info, num_prompt))
    tokens, stops = list(order.prompt_token_ids), order.stop_token_ids
    values, salt = digests(tokens, num_prompt, identity), zlib.crc32((identity or "").encode())
    while (count := len(tokens) - num_prompt) < most:
        tokens.append(draw(values[-1], params, order.seed, choice, len(tokens), stops, count))
        if tokens[-1] in stops:
            break
        values.append(_digest(values, tokens[-1], TokenKind.GENERATED if kinds else TokenKind.PROMPT, salt))
    return tokens[num_prompt:], values


class Collector:
    """Joins deltas and checks what every stream must keep: one ending per choice, and nothing after it."""

    def __init__(self) -> None:
        self.accumulators: dict[str, OutputAccumulator] = {}
        self.deltas: list[CompletionDelta] = []

    def expect(self, order: EngineRequest) -> None:
        self.accumulators[order.request_id] = OutputAccumulator(order.request_id, None, order.prompt_token_ids, order.sampling_params.n)

    def add(self, deltas: Sequence[CompletionDelta]) -> None:
        for delta in deltas:
            accumulator = self.accumulators[delta.request_id]
            assert accumulator.output.outputs[delta.index].finish_reason is None, "a delta after the last one"
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
            assert (delta.metrics is not None) == (delta.finish_reason is not None)
            accumulator.add(delta)
        self.deltas += deltas

    @property
    def outputs(self) -> dict[str, RequestOutput]:
        return {name: accumulator.output for name, accumulator in self.accumulators.items()}

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return self.outputs[request_id].outputs[choice].token_ids


def letters(length: int, start: int = 5) -> list[int]:
    """A prompt of ordinary tokens; another `start`, another prompt."""
    return [5 + (start * 3 + i * 7) % 25 for i in range(length)]


def begin(core: EngineCore, orders: Sequence[EngineRequest], steps: int = 0) -> Collector:
    """Add all and take so many steps, with the invariants checked after each."""
    collector = Collector()
    for order in orders:
        collector.expect(order)
        core.add_request(order)
    for _ in range(steps):
        collector.add(core.step())
        core.check_invariants()
    return collector


def run(core: EngineCore, orders: Sequence[EngineRequest], most_steps: int = 5000) -> dict[str, RequestOutput]:
    """Add all, step to the end with the invariants checked after each step, and see that nothing is left behind."""
    collector = begin(core, orders)
    finish(core, collector, most_steps)
    return collector.outputs


def finish(core: EngineCore, collector: Collector, most_steps: int = 5000) -> None:
    for _ in range(most_steps):
        if not core.has_unfinished_requests():
            break
        collector.add(core.step())
        core.check_invariants()
    assert not core.has_unfinished_requests(), "the engine does not come to an end"
    assert core.stats.blocks_used == 0 and core.stats.running == core.stats.waiting == core.stats.holding == 0


def check_against_reference(outputs: dict[str, RequestOutput], orders: Sequence[EngineRequest], info: ExecutorInfo) -> None:
    for order in orders:
        for choice in outputs[order.request_id].outputs:
            assert choice.token_ids == reference_tokens(order, choice.index, info), f"{order.request_id} choice {choice.index}"
