"""PrefixCache: which beginning of a request is in the pools already, or about to be.

Owner: KVCacheManager, which holds the blocks found. The pools know what each of their blocks contains. Not here: block tables,
when a request starts on a hit (kv_cache_manager.py), who waits for a beginning (followers.py).

A prefix hit walks full blocks from the start and compares parent and tokens exactly (block_pool.BlockKey). At least the
last known token is always computed, for its logits: where the hit covers that too, the last block is copied. The key says
which tokens are prompt and which generated, since their arithmetic differs; with `reuse_generated` it does not.

In groups with a sliding window a hit needs the blocks over the last window of it only. Prefixes are named by group 0, the one
without a window where there is one; where there is none, it remembers names whose blocks are gone.
"""

from __future__ import annotations

import os
from array import array

from octavo.engine.block_pool import NO_BLOCK, ROOT, BlockKey, BlockPool
from octavo.engine.metrics import EngineStats
from octavo.engine.request import Request
from octavo.engine.scheduler_output import KVGroup

#: Names of evicted prefixes that a pool remembers for each of its blocks, where no group keeps whole prefixes.
NAMES_PER_BLOCK = 16


class PrefixCache:
    def __init__(self, groups: tuple[KVGroup, ...], stats: EngineStats, *, enabled: bool, reuse_generated: bool) -> None:
        """Makes the pools, one per group, which the KVCacheManager shares."""
        self.enabled = enabled
        self.reuse_generated = reuse_generated
        self.block_size = groups[0].block_size
        names = NAMES_PER_BLOCK * groups[0].num_blocks if groups[0].sliding_window is not None else 0
        self.pools = tuple(BlockPool(group.num_blocks, stats, 0 if g else names) for g, group in enumerate(groups))
        self._groups = groups
        self._any_window = any(group.sliding_window is not None for group in groups)
        self._secret = os.urandom(16)

    def match(self, request: Request, most: int | None = None) -> tuple[list[list[int]], list[int]]:
        """Blocks per group, and serials, of the longest cached prefix in whole blocks (at most `most`); may cover every known
        token. Groups with a window need the blocks that its next row sees; the others need all."""
        blocks: list[list[int]] = [[] for _ in self.pools]
        serials: list[int] = []
        if not self.enabled or request.bypasses_prefix_cache:
            return blocks, serials
        whole = request.num_tokens // self.block_size
        unbroken = [0] * len(self.pools)  # how many blocks up to here can be found, without a gap
        hit = 0
        for index in range(whole if most is None else min(most, whole)):
            key = self.key(request, index, serials[-1] if serials else ROOT)
            found = [pool.lookup(key) for pool in self.pools]
            if None in found and not self._any_window:
                break
            serial = self.pools[0].serial_of(key)
            if serial is None:
                break
            serials.append(serial)
            for g, cached in enumerate(found):
                blocks[g].append(NO_BLOCK if cached is None else cached.block_id)
                unbroken[g] = 0 if cached is None else unbroken[g] + 1
            if not self._any_window or self._covers(unbroken, index + 1, request):
                hit = index + 1
        starts = starts_of(self._groups, min(hit * self.block_size, request.num_tokens - 1))
        return [[NO_BLOCK] * start + table[start:hit] for start, table in zip(starts, blocks, strict=True)], serials[:hit]

    def _covers(self, unbroken: list[int], num_blocks: int, request: Request) -> bool:
        """The last `unbroken` blocks of each group are all that the row after a hit of `num_blocks` sees."""
        starts = starts_of(self._groups, min(num_blocks * self.block_size, request.num_tokens - 1))
        return all(num_blocks - start <= count for start, count in zip(starts, unbroken, strict=True))

    def follow(self, request: Request, serials: list[int], most: int) -> int:
        """Bring `serials` (of the prefix of a waiting request that group 0 knows, [] at first) up to date with at most about
        `most` lookups; returns how many it took. Costs what has changed, not what is known. Does not ask whether groups with a
        window still have its end: an estimate there, from above."""
        pool, lookups = self.pools[0], 0
        if not self.enabled or request.bypasses_prefix_cache:
            return lookups
        while serials and lookups < most:  # evicted from its end
            serial = pool.serial_of(self.key(request, len(serials) - 1, serials[-2] if len(serials) > 1 else ROOT))
            lookups += 1
            if serial == serials[-1]:
                break
            serials.pop()
        while lookups < most and len(serials) < request.num_tokens // self.block_size:
            serial = pool.serial_of(self.key(request, len(serials), serials[-1] if serials else ROOT))
            lookups += 1
            if serial is None:
                break
            serials.append(serial)
        return lookups

    def shared_beginning(self, request: Request, other: Request) -> int:
        """Prompt tokens of a waiting request, in whole blocks, that `other` computes too and has not made findable yet; or 0."""
        size, mine, theirs = self.block_size, request.origin, other.origin
        if not self.enabled or request.bypasses_prefix_cache:
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

    def name_blocks(self, request: Request, tables: tuple[list[int], ...], serials: list[int]) -> None:
        """Make the full blocks findable whose KV has been written; `serials` names those before, and grows."""
        for index in range(len(serials), request.num_computed_tokens // self.block_size):
            key = self.key(request, index, serials[-1] if serials else ROOT)
            serials.append(self.pools[0].register(tables[0][index], key))
            for pool, table in zip(self.pools[1:], tables[1:], strict=True):
                pool.register(table[index], key, serials[-1])

    def key(self, request: Request, index: int, parent: int) -> BlockKey:
        """Of the block at that place of the request's table, behind the prefix named `parent`."""
        start = index * self.block_size
        return BlockKey(
            parent=parent,
            tokens=self._secret + array("q", request.token_ids[start : start + self.block_size]).tobytes(),
            num_prompt_tokens=0 if self.reuse_generated else max(0, min(self.block_size, request.num_prompt_tokens - start)),
            adapter=request.origin.adapter,
            cache_salt=request.origin.cache_salt,
        )


def starts_of(groups: tuple[KVGroup, ...], num_computed: int) -> list[int]:
    """Per group: the first block that a row at position `num_computed` or later sees."""
    return [group.first_block_seen(num_computed) for group in groups]
