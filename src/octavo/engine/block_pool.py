"""BlockPool: the blocks of one KV group: who holds them, which are free, which can be found by what they contain.

Owner: KVCacheManager, one pool per group. A block is in exactly one of two states: held (reference count > 0) or free;
a free block may still be findable ("cached") until it is needed for something else.
Not here: requests, tokens of requests, the memory itself (worker/kv_cache.py).

Free blocks form one list: blocks with nothing in them at the front, cached ones behind in order of last use, so that
taking from the front evicts nothing while an empty block is left, and the least recently used prefix after that. Every operation is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from octavo.engine.metrics import EngineStats

#: Serial of the empty prefix.
ROOT = 0
#: Stands in a block table for a block behind the window. No block has this number, so that reading it is an error.
NO_BLOCK = -1


class BlockKey(NamedTuple):
    """What a full block contains, exactly. A lookup compares every field, so equal hashes never share a block.

    `parent` is the serial of the registered prefix before it; serials are never used twice, so it stands for all
    earlier tokens, their kinds, the adapter and the salt.
    """

    parent: int
    #: A secret of this engine, then the ids. Python hashes bytes whole, so without the secret nobody can make up prompts
    #: whose blocks have equal hashes (a tuple of integers has a hash that anybody can compute).
    tokens: bytes
    #: How many of the tokens (the first ones) are prompt tokens: the arithmetic of a row follows its kind.
    num_prompt_tokens: int
    adapter: str | None
    cache_salt: str | None


class CachedBlock(NamedTuple):
    block_id: int
    #: Names the prefix that ends with this block.
    serial: int


class BlockHolder(NamedTuple):
    request_id: str
    #: Place in the request's block table; -1 where a copy that has not run yet holds its source.
    place: int


class BlockView(NamedTuple):
    """One block as a reader sees it (trace, the lab): a copy of the facts, not the block."""

    group: int
    block_id: int
    holders: tuple[BlockHolder, ...]
    ref_count: int
    #: It can be found by what it contains, held or free.
    cached: bool


class BlockPool:
    def __init__(self, num_blocks: int, stats: EngineStats, num_names: int = 0) -> None:
        """`num_names`: so many evicted prefixes keep their serials, so that a prefix can be walked whose blocks are gone."""
        self.num_blocks = num_blocks
        self.num_names = num_names
        self.stats = stats
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index: dict[BlockKey, CachedBlock] = {}
        self._key_of: dict[int, BlockKey] = {}
        #: Serials of evicted prefixes, least recently used first.
        self._names: OrderedDict[BlockKey, int] = OrderedDict()
        self._last_serial = ROOT

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._index)

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._key_of

    def take(self) -> int:
        """A private block (reference count 1) with nothing findable in it. Raises KeyError when none is free."""
        block_id, _ = self._free.popitem(last=False)
        if block_id in self._key_of:
            self._forget(block_id)
            self.stats.blocks_evicted += 1
        self.ref_counts[block_id] = 1
        self.stats.blocks_taken += 1
        return block_id

    def share(self, block_id: int) -> None:
        """One more holder; a cached free block becomes held again."""
        if self.ref_counts[block_id] == 0:
            del self._free[block_id]
        self.ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """One holder less; the last one frees it."""
        count = self.ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} released more often than held"
        self.ref_counts[block_id] = count
        if count == 0:
            self.stats.blocks_freed += 1
            self._free[block_id] = None
            if block_id not in self._key_of:
                self._free.move_to_end(block_id, last=False)

    def lookup(self, key: BlockKey) -> CachedBlock | None:
        return self._index.get(key)

    def serial_of(self, key: BlockKey) -> int | None:
        """The serial of a prefix whose last block can be found, or whose name is still known."""
        cached = self._index.get(key)
        if cached is not None:
            return cached.serial
        serial = self._names.get(key)
        if serial is not None:
            self._names.move_to_end(key)
        return serial

    def register(self, block_id: int, key: BlockKey, serial: int | None = None) -> int:
        """Make a held block findable, its KV being written; returns the serial of the prefix it ends.

        `serial`: the one that another pool gave this prefix; by default it is drawn here.
        Where another block has that key already, this one stays private and the other's serial is returned.
        """
        known = self._index.get(key)
        if known is not None:
            return known.serial
        if serial is None:
            serial = self._names.pop(key, None) or self._last_serial + 1
        self._last_serial = max(self._last_serial, serial)
        self._index[key] = CachedBlock(block_id, serial)
        self._key_of[block_id] = key
        return serial

    def reset(self) -> None:
        """Nothing can be found any more; held blocks stay with their holders."""
        self._index.clear()
        self._key_of.clear()
        self._names.clear()

    def _forget(self, block_id: int) -> None:
        key = self._key_of.pop(block_id)
        cached = self._index.pop(key)
        if self.num_names:
            self._names[key] = cached.serial
            if len(self._names) > self.num_names:
                self._names.popitem(last=False)

    def check_invariants(self, holders: dict[int, int]) -> None:
        """`holders`: block id -> how often it is held, from the tables. Raises AssertionError naming the block."""
        for block_id, count in enumerate(self.ref_counts):
            assert count == holders.get(block_id, 0), f"block {block_id}: count {count}, holders {holders.get(block_id, 0)}"
            assert (count == 0) == (block_id in self._free), f"block {block_id}: count {count}, free {block_id in self._free}"
        assert len(self._free) + len(holders) == self.num_blocks
        assert len(self._index) == len(self._key_of)
        for key, cached in self._index.items():
            assert self._key_of.get(cached.block_id) == key, f"block {cached.block_id} is indexed under another key"
            assert 0 < cached.serial <= self._last_serial
            assert key.parent < cached.serial, "a prefix is older than its parent"
        serials = [*(cached.serial for cached in self._index.values()), *self._names.values()]
        assert len(set(serials)) == len(serials)
        assert len(self._names) <= self.num_names and not self._names.keys() & self._index.keys()
