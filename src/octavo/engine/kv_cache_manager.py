"""KVCacheManager: which blocks hold which request's KV, in every KV group.

Owner of all block tables and pools. The rules it keeps:
- a shared or findable block is never written: whoever must write into one gets a copy first (copy on write);
- a block becomes findable only by `commit`, after the step that wrote it has returned;
- copies run before anything in a step writes, and their sources stay held until the step has run.
Not here: when to admit or preempt (scheduler.py), the memory (worker/kv_cache.py).

A prefix hit walks full blocks from the start and compares parent and tokens exactly (block_pool.BlockKey). At least the
last known token is always computed, for its logits: where the hit covers that too, the last block is copied. The key says
which tokens are prompt and which generated, since their arithmetic differs; with `reuse_generated` it does not.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from dataclasses import dataclass

from octavo.engine.block_pool import ROOT, BlockHolder, BlockKey, BlockPool, BlockView
from octavo.engine.executor import KVGroup
from octavo.engine.metrics import EngineStats
from octavo.engine.request import Request
from octavo.engine.scheduler_output import BlockCopy


@dataclass(slots=True)
class _Holding:
    """What one request holds: a block table per group, and how far its blocks have been named by prefix serials."""

    tables: tuple[list[int], ...]
    #: Per group: serial of the prefix of 1, 2, ... committed blocks.
    serials: tuple[list[int], ...]
    #: False after a reset of the cache: what was computed before it is never made findable again.
    findable: bool = True


class KVCacheManager:
    """One pool and one block table per group; all groups have the same block size (ValueError otherwise)."""

    def __init__(
        self, groups: tuple[KVGroup, ...], enable_prefix_caching: bool, stats: EngineStats, *, reuse_generated: bool = False
    ) -> None:
        if not groups or len({group.block_size for group in groups}) != 1:
            raise ValueError("KV groups must exist and share one block size")
        self.block_size = groups[0].block_size
        self.pools = tuple(BlockPool(group.num_blocks, stats) for group in groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.reuse_generated = reuse_generated
        self.stats = stats
        self._secret = os.urandom(16)
        self._holdings: dict[str, _Holding] = {}
        #: Copies that the next step will run, by request; each holds its source.
        self._copies: dict[str, list[BlockCopy]] = {}
        self._copies_in_flight: list[BlockCopy] = []

    @property
    def num_free_blocks(self) -> int:
        return min(pool.num_free for pool in self.pools)

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

    # Starting a request

    def match_prefix(self, request: Request) -> tuple[list[list[int]], list[list[int]]]:
        """Blocks and serials, per group, of the longest cached prefix in whole blocks; may cover every known token."""
        blocks: list[list[int]] = [[] for _ in self.pools]
        serials: list[list[int]] = [[] for _ in self.pools]
        if not self.enable_prefix_caching or request.bypasses_prefix_cache:
            return blocks, serials
        for index in range(request.num_tokens // self.block_size):
            found = []
            for pool, chain in zip(self.pools, serials, strict=True):
                cached = pool.lookup(self._key(request, index, chain[-1] if chain else ROOT))
                if cached is None:
                    return blocks, serials
                found.append(cached)
            for group, cached in enumerate(found):
                blocks[group].append(cached.block_id)
                serials[group].append(cached.serial)
        return blocks, serials

    def follow_prefix(self, request: Request, serials: list[int], most: int) -> int:
        """Bring `serials` (of the prefix of a waiting request that group 0 holds, [] at first) up to date with at most about
        `most` lookups; returns how many it took. Costs what has changed, not what is known."""
        pool, lookups = self.pools[0], 0
        if not self.enable_prefix_caching or request.bypasses_prefix_cache:
            return lookups
        while serials and lookups < most:  # evicted from its end
            found = pool.lookup(self._key(request, len(serials) - 1, serials[-2] if len(serials) > 1 else ROOT))
            lookups += 1
            if found is not None and found.serial == serials[-1]:
                break
            serials.pop()
        while lookups < most and len(serials) < request.num_tokens // self.block_size:
            found = pool.lookup(self._key(request, len(serials), serials[-1] if serials else ROOT))
            lookups += 1
            if found is None:
                break
            serials.append(found.serial)
        return lookups

    def shared_beginning(self, request: Request, other: Request) -> int:
        """Prompt tokens of a waiting request, in whole blocks, that `other` computes too and has not made findable yet; or 0."""
        size, mine, theirs = self.block_size, request.origin, other.origin
        if not self.enable_prefix_caching or request.bypasses_prefix_cache or not self._holdings[other.request_id].findable:
            return 0
        if (mine.adapter, mine.cache_salt) != (theirs.adapter, theirs.cache_salt):
            return 0
        done = other.num_computed_tokens // size
        most = min(request.num_prompt_tokens, other.num_prompt_tokens, other.num_target_tokens) // size
        count = 0
        if done < most and request.token_ids[: done * size] == other.token_ids[: done * size]:
            count = done
            while (
                count < most and request.token_ids[count * size : (count + 1) * size] == other.token_ids[count * size : (count + 1) * size]
            ):
                count += 1
        return count * size if count > done else 0

    def admit(self, request: Request, headroom: int = 0, *, twice: bool = False) -> bool:
        """Give a request blocks for all tokens it has to compute, shared with a cached prefix where there is one.

        Sets num_computed_tokens. False, with nothing changed, unless `headroom` blocks stay free beside, and with `twice` as
        many again as the tokens it has to compute fill.
        """
        blocks, serials = self.match_prefix(request)
        hit = min(len(blocks[0]) * self.block_size, request.num_tokens - 1)
        if twice:
            headroom += self.blocks_for(request.num_target_tokens - hit)
        done = self._start(request, blocks, serials, hit, headroom)
        if not done and hit % self.block_size and request.num_target_tokens > hit:
            # The copy of the last block is one block too many: compute the whole of that block instead.
            done = self._start(request, blocks, serials, hit - hit % self.block_size, headroom)
        if done:
            self.stats.prefix_query_tokens += request.num_tokens
            self.stats.prefix_hit_tokens += request.num_computed_tokens
        return done

    def fork(self, parent: Request, child: Request, *, last: bool, headroom: int = 0) -> bool:
        """Start a child on all blocks of its parent, which has computed all but the child's last token.

        The `last` child takes the parent's place, so that a partial last block can be written where it is: n children make
        n - 1 copies of it, also in one step.
        """
        source = self._holdings[parent.request_id]
        if last:
            child.num_computed_tokens = parent.num_computed_tokens
            self._holdings[child.request_id] = self._holdings.pop(parent.request_id)
            done = self.allocate_slots(child, child.num_target_tokens, headroom)
            if not done:
                self._holdings[parent.request_id] = self._holdings.pop(child.request_id)
                child.num_computed_tokens = 0
        else:
            done = self._start(child, list(source.tables), list(source.serials), parent.num_computed_tokens, headroom, source.findable)
        self.stats.forks += done
        return done

    def _start(
        self,
        request: Request,
        blocks: list[list[int]],
        serials: list[list[int]],
        num_computed: int,
        headroom: int,
        findable: bool = True,
    ) -> bool:
        """Hold the given blocks, whose first `num_computed` tokens are of use, and allocate the rest; or do nothing.

        `findable` False: those blocks were computed before a reset of the cache.
        """
        used, named = self.blocks_for(num_computed), num_computed // self.block_size
        holding = _Holding(tuple(table[:used] for table in blocks), tuple(chain[:named] for chain in serials), findable=findable)
        for pool, table in zip(self.pools, holding.tables, strict=True):
            for block_id in table:
                pool.share(block_id)
        self._holdings[request.request_id] = holding
        request.num_computed_tokens = num_computed
        if self.allocate_slots(request, request.num_target_tokens, headroom):
            self.stats.blocks_shared += used * len(self.pools)
            return True
        self.free(request)
        request.num_computed_tokens = 0
        return False

    # Growing, writing, sharing

    def allocate_slots(self, request: Request, num_tokens: int, headroom: int = 0) -> bool:
        """Make positions [num_computed_tokens, num_tokens) writable: append blocks, copy shared ones.

        All or nothing: False, with nothing changed, when a pool has too few free blocks. A block is replaced by its
        copy only before the worker knows the request, because a step can only append to a known table.
        """
        holding = self._holdings[request.request_id]
        needed = self.blocks_for(num_tokens)
        writes = num_tokens > request.num_computed_tokens
        first = request.num_computed_tokens // self.block_size if writes else needed
        plans = []
        for group, (pool, table) in enumerate(zip(self.pools, holding.tables, strict=True)):
            written = range(first, min(needed, len(table)))
            shared = [index for index in written if self._is_shared(group, table[index])]
            fresh = max(0, needed - len(table))
            if fresh + len(shared) > 0 and fresh + len(shared) + headroom > pool.num_free:
                return False
            plans.append((group, pool, table, shared, fresh))
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

    def has_slot(self, request: Request) -> bool:
        """The next token of a request can be written without another block: what `allocate_slots` would find, for one token."""
        index = request.num_computed_tokens // self.block_size
        for pool, table in zip(self.pools, self._holdings[request.request_id].tables, strict=True):
            if index >= len(table) or pool.ref_counts[table[index]] != 1 or pool.is_cached(table[index]):
                return False
        return True

    def commit(self, request: Request) -> None:
        """Make the full blocks findable whose KV has been written: call when a step's result is back."""
        holding = self._holdings[request.request_id]
        named, full = len(holding.serials[0]), request.num_computed_tokens // self.block_size
        if named >= full or not self.enable_prefix_caching or not holding.findable:
            return
        for index in range(named, full):
            for pool, table, chain in zip(self.pools, holding.tables, holding.serials, strict=True):
                key = self._key(request, index, chain[-1] if chain else ROOT)
                chain.append(pool.register(table[index], key))

    def free(self, request: Request) -> None:
        """Let go of everything a request holds, if anything; its full blocks stay findable until they are needed."""
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        for copy in self._copies.pop(request.request_id, ()):
            self.pools[copy.group].release(copy.source)
        for pool, table in zip(self.pools, holding.tables, strict=True):
            for block_id in reversed(table):  # the end of a prefix is evicted before its beginning
                pool.release(block_id)

    def tokens_at_risk(self, request: Request) -> int:
        """Tokens it would have to compute again if it were preempted and nobody else kept their blocks; -1 if that would free no block.

        Blocks are shared from the beginning on, so it looks at O(log blocks) of them.
        """
        found = -1
        for pool, table in zip(self.pools, self.block_tables(request), strict=True):
            shared = bisect_left(table, True, key=lambda block_id: pool.ref_counts[block_id] == 1)  # noqa: B023 - used at once
            if shared < len(table):
                found = max(found, request.num_computed_tokens - shared * self.block_size, 0)
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

    def _key(self, request: Request, index: int, parent: int) -> BlockKey:
        start = index * self.block_size
        return BlockKey(
            parent=parent,
            tokens=self._secret + array("q", request.token_ids[start : start + self.block_size]).tobytes(),
            num_prompt_tokens=0 if self.reuse_generated else max(0, min(self.block_size, request.num_prompt_tokens - start)),
            adapter=request.origin.adapter,
            cache_salt=request.origin.cache_salt,
        )

    # Looking

    def snapshot(self) -> list[BlockView]:
        """Every block of every group, in order, with its holders: for readers of a step. O(blocks + holders)."""
        holders: dict[tuple[int, int], list[BlockHolder]] = {}
        for request_id, holding in self._holdings.items():
            for group, table in enumerate(holding.tables):
                for index, block_id in enumerate(table):
                    holders.setdefault((group, block_id), []).append(BlockHolder(request_id, index))
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
            for table in self.block_tables(request):
                assert len(table) >= self.blocks_for(request.num_computed_tokens), f"{request.request_id}: table too short"
                assert len(set(table)) == len(table), f"{request.request_id}: a block twice in one table"
        copies = [*self._copies_in_flight, *(copy for copies in self._copies.values() for copy in copies)]
        for group, pool in enumerate(self.pools):
            counts: dict[int, int] = {}
            held = [block for holding in self._holdings.values() for block in holding.tables[group]]
            for block_id in [*held, *(copy.source for copy in copies if copy.group == group)]:
                counts[block_id] = counts.get(block_id, 0) + 1
            pool.check_invariants(counts)
