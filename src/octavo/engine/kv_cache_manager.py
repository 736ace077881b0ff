"""KVCacheManager: which blocks hold which request's KV, in every KV group.

Owner of all block tables and pools. The rules it keeps:
- a shared or findable block is never written: whoever must write into one gets a copy first (copy on write);
- a block becomes findable only by `commit`, after the step that wrote it has returned;
- copies run before anything in a step writes, and their sources stay held until the step has run.
Not here: when to admit or preempt (scheduler.py), the memory (worker/kv_cache.py).

Groups with a sliding window hold no block that lies wholly behind the window of every later row: its place in the table is NO_BLOCK.
They get their blocks step by step (`allocate_chunk`); what a prefill will still need of them is promised to it, so that no
other is admitted on it. What a hit is: prefix_cache.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from octavo.engine.block_pool import NO_BLOCK, BlockHolder, BlockView
from octavo.engine.executor import KVGroup
from octavo.engine.metrics import EngineStats
from octavo.engine.prefix_cache import PrefixCache, starts_of
from octavo.engine.request import Request
from octavo.engine.scheduler_output import BlockCopy


@dataclass(slots=True)
class _Holding:
    """What one request holds: a block table per group, and how far its blocks have been named by prefix serials."""

    tables: tuple[list[int], ...]
    #: Per group: how many places of the table, the first ones, are NO_BLOCK.
    starts: list[int]
    #: Serial of the prefix of 1, 2, ... committed blocks.
    serials: list[int]
    #: Tokens it was started to compute, and the most blocks each group will hold until then.
    num_target_tokens: int = 0
    promised: list[int] = field(default_factory=list)
    #: False after a reset of the cache: what was computed before it is never made findable again.
    findable: bool = True

    def still_promised(self, group: int) -> int:
        """Blocks of the group it may take beside those it has."""
        return max(0, self.promised[group] - (len(self.tables[group]) - self.starts[group])) if self.promised else 0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request must leave to others when it starts, in blocks of every pool."""

    headroom: int = 0
    #: So many more, but never more than half of a pool. In groups with a window that limit is for both together.
    reserve: int = 0
    #: Not None: change nothing, but say whether it could start if these requests had let go of all they hold.
    without: Collection[Request] | None = None

    def spare(self, num_blocks: int, window: bool) -> int:
        half = num_blocks // 2
        return min(self.headroom + self.reserve, half) if window else self.headroom + min(self.reserve, half)


NO_TERMS = Terms()


class KVCacheManager:
    """One pool and one block table per group; all groups have the same block size (ValueError otherwise).

    max_chunk: most tokens of one request in a step.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        enable_prefix_caching: bool,
        stats: EngineStats,
        *,
        reuse_generated: bool = False,
        max_chunk: int = 512,
    ) -> None:
        if not groups or len({group.block_size for group in groups}) != 1:
            raise ValueError("KV groups must exist and share one block size")
        if groups[0].sliding_window is not None and any(group.sliding_window is None for group in groups):
            raise ValueError("groups without a window come first")
        self.block_size = groups[0].block_size
        self.groups = groups
        self.max_chunk = max_chunk
        #: Numbers of the groups with a window.
        self._windows = tuple(g for g, group in enumerate(groups) if group.sliding_window is not None)
        self.prefixes = PrefixCache(groups, stats, enabled=enable_prefix_caching, reuse_generated=reuse_generated)
        self.pools = self.prefixes.pools
        self.stats = stats
        self._holdings: dict[str, _Holding] = {}
        #: Copies that the next step will run, by request; each holds its source.
        self._copies: dict[str, list[BlockCopy]] = {}
        self._copies_in_flight: list[BlockCopy] = []

    def room(self) -> tuple[int, ...]:
        """Blocks of each group that are free and not promised: while it is the same, what could not be admitted still cannot."""
        return tuple(pool.num_free - (self._promised(g) if g in self._windows else 0) for g, pool in enumerate(self.pools))

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        return sum(pool.num_blocks - pool.num_free for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_tables(self, request: Request) -> tuple[list[int], ...]:
        """The tables themselves, one per group: read only."""
        return self._holdings[request.request_id].tables

    def shared_beginning(self, request: Request, other: Request) -> int:
        """As PrefixCache says, and 0 where what the other computes will not become findable."""
        return self.prefixes.shared_beginning(request, other) if self._holdings[other.request_id].findable else 0

    # Starting a request

    def admit(self, request: Request, terms: Terms = NO_TERMS, *, twice: bool = False) -> bool:
        """Give a request blocks for all tokens it has to compute, shared with a cached prefix where there is one; in groups with
        a window only the promise of as many as it will hold at a time.

        Sets num_computed_tokens. False, with nothing changed, unless the `terms` hold; with `twice` as many blocks again as the
        tokens it has to compute fill are part of the reserve.
        """
        blocks, serials = self.prefixes.match(request)
        hit = min(len(blocks[0]) * self.block_size, request.num_tokens - 1)
        if twice:
            terms = replace(terms, reserve=terms.reserve + self.blocks_for(request.num_target_tokens - hit))
        done = self._start(request, blocks, serials, hit, terms)
        if not done and hit % self.block_size and request.num_target_tokens > hit:
            # The copy of the last block is one block too many: compute the whole of that block instead.
            if self._windows:
                blocks, serials = self.prefixes.match(request, len(serials) - 1)
            done = self._start(request, blocks, serials, min(len(serials), hit // self.block_size) * self.block_size, terms)
        if done and terms.without is None:
            self.stats.prefix_query_tokens += request.num_tokens
            self.stats.prefix_hit_tokens += request.num_computed_tokens
        return done

    def fork(self, parent: Request, child: Request, terms: Terms = NO_TERMS, *, last: bool) -> bool:
        """Start a child on all blocks of its parent, which has computed all but the child's last token, if the `terms` hold.

        The `last` child takes the parent's place, so that a partial last block can be written where it is: n children make
        n - 1 copies of it, also in one step.
        """
        source = self._holdings[parent.request_id]
        if last:
            child.num_computed_tokens = parent.num_computed_tokens
            self._holdings[child.request_id] = self._holdings.pop(parent.request_id)
            done = self._allocate_first(child, terms)
            if not done or terms.without is not None:
                self._holdings[parent.request_id] = self._holdings.pop(child.request_id)
                child.num_computed_tokens = 0
        else:
            done = self._start(child, list(source.tables), list(source.serials), parent.num_computed_tokens, terms, source.findable)
        self.stats.forks += done and terms.without is None
        return done

    def _start(
        self,
        request: Request,
        blocks: list[list[int]],
        serials: list[int],
        num_computed: int,
        terms: Terms,
        findable: bool = True,
    ) -> bool:
        """Hold the given blocks, whose first `num_computed` tokens are of use, and allocate the rest; or do nothing.

        `findable` False: those blocks were computed before a reset of the cache.
        """
        used, named = self.blocks_for(num_computed), num_computed // self.block_size
        starts = starts_of(self.groups, num_computed)
        holding = _Holding(tuple(table[:used] for table in blocks), starts, serials[:named], findable=findable)
        for pool, table, start in zip(self.pools, holding.tables, starts, strict=True):
            for block_id in table[start:]:
                pool.share(block_id)
        self._holdings[request.request_id] = holding
        request.num_computed_tokens = num_computed
        done = self._allocate_first(request, terms)
        if done and terms.without is None:
            self.stats.blocks_shared += used * len(self.pools) - sum(starts)
        else:
            self.free(request)
            request.num_computed_tokens = 0
        return done

    # Growing, writing, sharing

    def _allocate_first(self, request: Request, terms: Terms) -> bool:
        """What a request gets when it starts: all blocks it has to write, or none. False, with nothing changed, if they are not free."""
        holding = self._holdings[request.request_id]
        promised = self._promised_to(request) if self._windows and request.num_missing_tokens > 0 else []
        if not self.allocate_slots(request, request.num_target_tokens, terms, promised):
            return False
        if terms.without is not None:
            return True
        holding.num_target_tokens, holding.promised = request.num_target_tokens, promised
        return True

    def _promised_to(self, request: Request) -> list[int]:
        """Per group: most blocks it will hold at a time until its known tokens are computed; 0 without a window."""
        most = [0] * len(self.pools)
        for g in self._windows:
            group = self.groups[g]
            at_a_time = group.blocks_in_window(min(self.max_chunk, request.num_missing_tokens))
            most[g] = min(self.blocks_for(request.num_target_tokens), at_a_time, group.num_blocks)
        return most

    def _promised(self, group: int) -> int:
        """Blocks that the requests not done with their known tokens may still take. O(requests)."""
        return sum(holding.still_promised(group) for holding in self._holdings.values())

    def _freed_without(self, requests: Collection[Request], group: int) -> int:
        """How many more blocks would be free, or not promised, if these requests let go of all they hold. O(their blocks)."""
        held: Counter[int] = Counter()
        promised = 0
        for request in requests:
            holding = self._holdings[request.request_id]
            held.update(holding.tables[group][holding.starts[group] :])
            held.update(copy.source for copy in self._copies.get(request.request_id, ()) if copy.group == group)
            promised += holding.still_promised(group)
        ref_counts = self.pools[group].ref_counts
        return promised + sum(ref_counts[block_id] == count for block_id, count in held.items())

    def allocate_slots(self, request: Request, num_tokens: int, terms: Terms = NO_TERMS, promised: list[int] | None = None) -> bool:
        """Make positions [num_computed_tokens, num_tokens) writable: append blocks, copy shared ones.

        All or nothing: False, with nothing changed, when a pool has too few free blocks. A block is replaced by its
        copy only before the worker knows the request, because a step can only append to a known table.
        `promised`, per group: groups with a window get no blocks yet, but must have so many that nobody else was promised.
        """
        holding = self._holdings[request.request_id]
        needed = self.blocks_for(num_tokens)
        writes = num_tokens > request.num_computed_tokens
        first = request.num_computed_tokens // self.block_size if writes else needed
        plans = []
        for group, (pool, table) in enumerate(zip(self.pools, holding.tables, strict=True)):
            written = range(first, min(needed, len(table)))
            shared = [index for index in written if self._is_shared(group, table[index])]
            fresh = wanted = max(0, needed - len(table))
            window = bool(promised) and group in self._windows
            spare = terms.spare(pool.num_blocks, window)
            if promised and window:
                fresh, wanted = 0, max(0, promised[group] - (len(table) - holding.starts[group]))
                spare += self._promised(group)
            free = pool.num_free + (self._freed_without(terms.without, group) if terms.without else 0)
            if wanted + len(shared) > 0 and wanted + len(shared) + spare > free:
                return False
            plans.append((group, pool, table, shared, fresh))
        if terms.without is not None:
            return True
        for group, pool, table, shared, fresh in plans:
            for index in shared:
                assert not request.known_to_worker, "a shared block would be written by a running request"
                copy = BlockCopy(group, table[index], pool.take())
                table[index] = copy.target
                self._copies.setdefault(request.request_id, []).append(copy)  # it keeps the reference to its source
                self.stats.blocks_copied += 1
            table.extend(pool.take() for _ in range(fresh))
        return True

    def _is_shared(self, group: int, block_id: int) -> bool:
        """Somebody would see it if the block were written. Not who only waits to copy it: copies run before anything writes."""
        pool = self.pools[group]
        holders = pool.ref_counts[block_id]
        if holders > 1 and self._copies:
            holders -= sum(copy.group == group and copy.source == block_id for copies in self._copies.values() for copy in copies)
        return holders > 1 or pool.is_cached(block_id)

    def allocate_chunk(self, request: Request, count: int, spare: int) -> int:
        """Make the next tokens of a request that has started writable: `count`, or fewer where a window's pool has too few blocks.

        Leaves `spare` blocks free, unless nothing could be computed then. Returns how many tokens; 0: no block is free.
        """
        if not self._windows or count < 1:
            return count
        done, tables = request.num_computed_tokens, self.block_tables(request)
        found = 0
        for keep in (spare, 0):
            room = min((len(tables[g]) + max(0, self.pools[g].num_free - keep)) * self.block_size for g in self._windows)
            found = min(count, room - done)
            if found > 0:
                break
        if found <= 0:
            return 0
        allocated = self.allocate_slots(request, done + found)
        assert allocated, "the blocks of a chunk are not free"
        return found

    def has_slot(self, request: Request) -> bool:
        """The next token of a request can be written without another block: what `allocate_slots` would find, for one token."""
        index = request.num_computed_tokens // self.block_size
        for pool, table in zip(self.pools, self._holdings[request.request_id].tables, strict=True):
            if index >= len(table) or pool.ref_counts[table[index]] != 1 or pool.is_cached(table[index]):
                return False
        return True

    def commit(self, request: Request) -> None:
        """Make the full blocks findable whose KV has been written, and let go of those that no later row sees: call when a
        step's result is back."""
        holding = self._holdings[request.request_id]
        if self.prefixes.enabled and holding.findable:
            self.prefixes.name_blocks(request, holding.tables, holding.serials)
        if self._windows:
            self._free_behind_window(request, holding)

    def _free_behind_window(self, request: Request, holding: _Holding) -> None:
        if request.num_computed_tokens >= holding.num_target_tokens:
            holding.promised = []
        starts = starts_of(self.groups, request.num_computed_tokens)
        for g in self._windows:
            pool, table = self.pools[g], holding.tables[g]
            for index in range(holding.starts[g], starts[g]):
                pool.release(table[index])
                table[index] = NO_BLOCK
            self.stats.blocks_freed_behind_window += starts[g] - holding.starts[g]
        holding.starts = starts

    def free(self, request: Request) -> None:
        """Let go of everything a request holds, if anything; its full blocks stay findable until they are needed."""
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        for copy in self._copies.pop(request.request_id, ()):
            self.pools[copy.group].release(copy.source)
        for pool, table, start in zip(self.pools, holding.tables, holding.starts, strict=True):
            for block_id in reversed(table[start:]):  # the end of a prefix is evicted before its beginning
                pool.release(block_id)

    def tokens_at_risk(self, request: Request) -> int:
        """Tokens it would have to compute again if it were preempted and nobody else kept their blocks; -1 if that would free no block.

        Blocks are shared from the beginning on, so it looks at O(log blocks) of them. Where some lie behind a window already, a hit
        on the shared ones would lack those before them, and it is all tokens.
        """
        found = -1
        holding = self._holdings[request.request_id]
        for pool, table, start in zip(self.pools, holding.tables, holding.starts, strict=True):
            shared = bisect_left(table, True, lo=start, key=lambda block_id: pool.ref_counts[block_id] == 1)  # noqa: B023 - used at once
            if shared < len(table):
                kept = 0 if start else shared * self.block_size
                found = max(found, request.num_computed_tokens - kept, 0)
        return found

    def take_copies(self) -> list[BlockCopy]:
        """The copies of the step about to run; their sources stay held until `release_copies`."""
        copies = [copy for copies in self._copies.values() for copy in copies]
        self._copies = {}
        self._copies_in_flight.extend(copies)
        return copies

    def release_copies(self) -> None:
        """The step has run: sources of its copies need not stay."""
        for copy in self._copies_in_flight:
            self.pools[copy.group].release(copy.source)
        self._copies_in_flight = []

    def reset_prefix_cache(self) -> None:
        """Forget what blocks contain, including what running requests have computed so far."""
        for pool in self.pools:
            pool.reset()
        for holding in self._holdings.values():
            holding.findable = False

    # Looking

    def snapshot(self) -> list[BlockView]:
        """Every block of every group, in order, with its holders: for readers of a step. O(blocks + holders)."""
        holders: dict[tuple[int, int], list[BlockHolder]] = {}
        for request_id, holding in self._holdings.items():
            for group, table in enumerate(holding.tables):
                for index in range(holding.starts[group], len(table)):
                    holders.setdefault((group, table[index]), []).append(BlockHolder(request_id, index))
        for request_id, copies in self._copies.items():
            for copy in copies:
                holders.setdefault((copy.group, copy.source), []).append(BlockHolder(request_id, -1))
        return [
            BlockView(group, block_id, tuple(holders.get((group, block_id), ())), pool.ref_counts[block_id], pool.is_cached(block_id))
            for group, pool in enumerate(self.pools)
            for block_id in range(pool.num_blocks)
        ]

    # Checking

    def check_invariants(self, holders: list[Request]) -> None:
        """Account for every block. `holders`: all requests that should hold any. O(blocks): for tests and debugging.

        Raises AssertionError saying what is wrong.
        """
        assert self._holdings.keys() == {request.request_id for request in holders}, "tables of unknown or missing requests"
        for request in holders:
            holding = self._holdings[request.request_id]
            assert holding.starts == starts_of(self.groups, request.num_computed_tokens), f"{request.request_id}: blocks behind a window"
            for table, start in zip(holding.tables, holding.starts, strict=True):
                assert len(table) >= self.blocks_for(request.num_computed_tokens), f"{request.request_id}: table too short"
                assert table[:start] == [NO_BLOCK] * start and NO_BLOCK not in table[start:], f"{request.request_id}: holes"
                assert len(set(table[start:])) == len(table) - start, f"{request.request_id}: a block twice in one table"
        copies = [*self._copies_in_flight, *(copy for copies in self._copies.values() for copy in copies)]
        for group, pool in enumerate(self.pools):
            counts: dict[int, int] = {}
            held = [block for holding in self._holdings.values() for block in holding.tables[group][holding.starts[group] :]]
            for block_id in [*held, *(copy.source for copy in copies if copy.group == group)]:
                counts[block_id] = counts.get(block_id, 0) + 1
            pool.check_invariants(counts)
