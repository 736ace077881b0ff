"""The one list of operations a model is made of, with shapes, meaning and output dtype of each.

A layer computes only through an `Ops` object. Three implement it: reference/ (NumPy, the specification), cpu/ (native
kernels on NumPy arrays) and torch/ (any torch device). ops/registry.py builds the one in use.

Conventions
- T: rows of the flat batch; rows [0, num_generated) are of kind GENERATED, the rest PROMPT (docs/numerics.md).
- Every array an op returns is float32 unless said otherwise, row-contiguous, and taken from the step arena
  (ops/arena.py): valid until the arena scope it was made in closes. Inputs may have a row stride (column slices).
- bfloat16 never crosses into NumPy arithmetic: it travels as uint16 with a dtype tag.
- Owner of KV memory and of packed weights: the Ops object that made them; their layout is private to it.
Not here: policy (which backend: registry.py), anything about requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from octavo.model_config import RopeConfig
    from octavo.ops.arena import Arena

#: An array of the backend: numpy.ndarray, or torch.Tensor under ops/torch.
Array = Any

Layout = Literal["f32", "f16", "bf16", "q4_b32", "q8_b32", "q8_b16", "q4_g128", "q8_g128"]
KVDtype = Literal["f32", "bf16", "f16", "int8"]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix [N, K] (N output columns, K inputs) in one of the few layouts every file format is transcoded into.

    value[n, k] = scale[n, k // block] * (q[n, k] - zero) + offset[n, k // block]

    | layout | data                                                        | block |
    |--------|-------------------------------------------------------------|-------|
    | f32    | float32 [N, K]                                              | -     |
    | f16    | uint16 [N, K] (IEEE half bits)                              | -     |
    | bf16   | uint16 [N, K] (bfloat16 bits)                               | -     |
    | q4_b32 | uint8 [N, K/2]; byte j of block b holds element b*32 + j in its low nibble and b*32 + 16 + j in its high | 32 |
    | q8_b32 | int8 [N, K]                                                 | 32    |
    | q8_b16 | int8 [N, K]                                                 | 16    |
    | q4_g128, q8_g128 | as q4_b32 and q8_b32, nibbles in the order of blocks of 32 | 128   |

    scale, offset: [N, K/block], float16 where the file's own are float16 (the transcoding is then exact), else float32.
    offset None means 0. zero: an integer subtracted from every q (8 for Q4_0). Arrays may be views of a mapped file:
    read-only, any strides. data of q4_b32 and q8_b32 may then be [N, K/32, bytes of a block], as the file's blocks lie.
    """

    layout: Layout
    shape: tuple[int, int]
    data: npt.NDArray[Any]
    scale: npt.NDArray[Any] | None = None
    offset: npt.NDArray[Any] | None = None
    zero: int = 0


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of the KV pool of one group. Blocks hold `block_size` tokens of every layer in the group."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype


@dataclass(frozen=True, slots=True)
class OpNeeds:
    """What a model asks of an op, for `Ops.supports`."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    rope_dim: int
    kv_dtype: KVDtype
    block_size: int
    sliding_window: bool = False
    softcap: bool = False
    layouts: frozenset[Layout] = frozenset()


@dataclass(slots=True)
class Taps:
    """What a reader wants to see of a step. Asking forces the eager path. Names: "embed", "layers.3.attn",
    "layers.3.mlp", "layers.3" (the residual stream after the layer), "norm", "logits"."""

    names: frozenset[str]
    values: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)


@dataclass(slots=True)
class ForwardBatch:
    """One step's rows, as every layer sees them. Built by worker/input_batch.py, read-only to layers.

    A segment is a run of rows of one request at consecutive positions; S segments, T rows, G KV groups.
    """

    token_ids: Array  # int32 [T]
    positions: Array  # int32 [T], position of each row in its own sequence
    query_start_loc: Array  # int32 [S + 1], first row of each segment
    seq_lens: Array  # int32 [S], tokens of the sequence after this step: last position of the segment + 1
    block_tables: tuple[Array, ...]  # per group int32 [S, max blocks]; entries past a sequence's end are unused
    slot_mapping: tuple[Array, ...]  # per group int64 [T], block * block_size + offset where the row's KV goes
    num_generated: int  # rows [0, num_generated) are of kind GENERATED
    logits_rows: Array  # int32 [R], rows whose logits are wanted, ascending
    num_generated_logits: int  # how many of logits_rows are < num_generated
    kv: tuple[Any, ...]  # per group, the pool made by Ops.alloc_kv
    taps: Taps | None = None

    @property
    def num_rows(self) -> int:
        return int(self.token_ids.shape[0])


class Replayer(Protocol):
    """Records the forward pass of a step, up to its logits, and replays it with the same bits, checks and errors."""

    def replay(self, batch: ForwardBatch) -> Array | None:
        """float32 [R, vocab] for any number of rows, after `begin_step`; None where no recording holds: `record` then.
        Raises what the ops would."""
        ...

    def record(self, batch: ForwardBatch, forward: Callable[[], Array]) -> Array:
        """What `forward` gives, whose ops are recorded while they run. If they cannot be, one log line says why."""
        ...


class SamplingKernels(Protocol):
    """What a backend with a native sampler offers. Definition of every setting: sampling/sampler.py; the tables and lists are
    made by sampling/native.py. Arguments are checked: ValueError, IndexError, TypeError."""

    def sample(
        self,
        logits: npt.NDArray[np.float32],  # [R, V], any row stride
        reals: npt.NDArray[np.float64],  # [R, 7] temperature, top_p, min_p, typical_p; repetition, presence, frequency penalty
        wholes: npt.NDArray[np.int64],  # [R, 4] top_k, greedy, logprobs (-1: none), processed
        keys: npt.NDArray[np.uint64],  # [R, 3] seed, choice, position
        edits: list[tuple[Any, ...] | None],  # ids int64 and values float32: bias, seen tokens and counts, banned, allowed
        tokens: npt.NDArray[np.int32],  # out [R], -1: the row has no token
        ids: npt.NDArray[np.int32],  # out [R, most logprobs + 1], the chosen token first; as are
        values: npt.NDArray[np.float64],
        ranks: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int32],  # out [R] entries of each row
    ) -> None: ...

    def logprobs(
        self,
        logits: npt.NDArray[np.float32],
        targets: npt.NDArray[np.int64],  # [R] tokens to report on
        logprobs: int,
        ids: npt.NDArray[np.int32],
        values: npt.NDArray[np.float64],
        ranks: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int32],
    ) -> None: ...


class Ops(Protocol):
    """See the module's text for the conventions. T, S, R, G as in ForwardBatch; D head size, H query heads, KH KV heads."""

    name: str
    arena: Arena
    #: None: the backend leaves sampling to NumPy.
    sampling_kernels: SamplingKernels | None

    # -- what can it do ------------------------------------------------------------------------------------------
    def supports(self, op: str, needs: OpNeeds) -> list[str]:
        """Reasons why this backend cannot run `op` for these needs; empty: it can."""
        ...

    def describe(self) -> dict[str, Any]:
        """For `doctor`: device, ISA level, threads, and the like; JSON-able."""
        ...

    def replayer(self) -> Replayer | None:
        """A new one; None where steps can only run eagerly."""
        ...

    # -- weights, once at load -----------------------------------------------------------------------------------
    def pack_linear(self, parts: Sequence[PackedTensor], bias: npt.NDArray[np.float32] | None = None) -> Any:
        """A weight for `linear` (and, of one part, for `embedding`): the parts' rows N stacked in order, so that
        q, k and v, or gate and up, become one call. Parts may differ in layout, not in K. bias: float32 [sum N].
        Copies what it needs: the parts' memory may go afterwards."""
        ...

    def pack_vector(self, values: npt.NDArray[np.float32]) -> Array:
        """A float32 vector on the device (norm weights)."""
        ...

    def rope_table(self, rope: RopeConfig, max_position: int) -> Any:
        """cos and sin of every position below max_position (computed in float64, stored float32)."""
        ...

    # -- a step --------------------------------------------------------------------------------------------------
    def begin_step(self, num_rows: int) -> None:
        """Empties the arena; every array of the step before is void."""
        ...

    def to_device(self, batch: ForwardBatch) -> ForwardBatch:
        """The same batch with its NumPy arrays on the device."""
        ...

    def to_numpy(self, x: Array) -> npt.NDArray[Any]:
        """A NumPy array of the values; may share memory with x."""
        ...

    def embedding(self, token_ids: Array, weight: Any) -> Array:
        """float32 [T, hidden]: row token_ids[t] of the (dequantised) matrix. Ids are in range: the engine checked."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """float32 [T, N]: x / sqrt(mean(x^2) + eps) * weight along the last axis (Zhang & Sennrich 2019).

        A row whose mean leaves float32 is NaN, not the zeros of a division by infinity: the damage must show."""
        ...

    def add_rms_norm(self, x: Array, y: Array, weight: Array, eps: float) -> Array:
        """x += y in place, then rms_norm of the sum: the bits of `add_` and `rms_norm`, in one pass."""
        ...

    def add_(self, x: Array, y: Array) -> None:
        """x += y, in place, float32 [T, N] both."""
        ...

    def linear(self, x: Array, weight: Any, num_generated: int) -> Array:
        """float32 [T, N]: x @ W.T + bias. Rows below num_generated use the arithmetic of generated rows, the others
        that of prompt rows; a row's bits depend on nothing but the row, its kind and W (native backend)."""
        ...

    def silu_mul(self, gate_up: Array) -> Array:
        """float32 [T, F] from [T, 2F]: silu(gate) * up, gate the first half of the columns (Shazeer 2020)."""
        ...

    def rope_kv_write(self, qkv: Array, rope: Any, layer: int, batch: ForwardBatch, group: int, num_heads: int) -> Array:
        """Rotates q and k of the fused rows qkv [T, (H + 2 KH) D] at batch.positions, writes k and v of every row to
        its slot of the group's pool (rounded to the pool's dtype; int8: one scale per token, KV head, and K or V, see
        ops/layout.py: quantize_int8), returns the rotated q: float32 [T, H, D]."""
        ...

    def attend(
        self, q: Array, layer: int, batch: ForwardBatch, group: int, scale: float, window: int | None = None, softcap: float = 0.0
    ) -> Array:
        """float32 [T, H * D]: causal attention of each row over the keys of its own sequence at positions
        (p - window, p], read from the pool through the block table; query head h reads KV head h // (H / KH)."""
        ...

    def take_rows(self, x: Array, rows: Array) -> Array:
        """float32 [R, N]: x[rows]. rows: int32 [R], on the device or in NumPy."""
        ...

    # -- KV ------------------------------------------------------------------------------------------------------
    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Real bytes of one block over all layers of the group, everything included (spec.num_blocks is not read)."""
        ...

    def alloc_kv(self, spec: KVSpec) -> Any:
        """The pool of one group. Memory is reserved now and touched when used."""
        ...

    def copy_blocks(self, kv: Any, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Whole blocks, all layers, K and V; no target is among the sources."""
        ...

    def export_block(self, kv: Any, block: int) -> npt.NDArray[np.float32]:
        """float32 [layers, 2, KH, block_size, D] (0 is K, 1 is V): the block in a layout everybody can read."""
        ...

    def import_block(self, kv: Any, block: int, values: npt.NDArray[np.float32]) -> None:
        """The inverse of export_block, exact for values that came from it."""
        ...
