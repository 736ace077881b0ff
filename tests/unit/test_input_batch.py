"""InputBatch against the flat arrays worked out row by row; its arrays are used again, so each step follows a different one."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.scheduler_output import NewRequest, ScheduledEntry, SchedulerOutput, TokenKind
from octavo.sampling_params import SamplingParams
from octavo.worker.input_batch import InputBatch

PARAMS = SamplingParams().resolve({})


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed):
    rng = np.random.default_rng(seed)
    sizes = (4, 16)
    batch = InputBatch(sizes, 1000)
    known: dict[str, dict] = {}
    for step in range(40):
        entries, new = [], []
        for i in range(int(rng.integers(1, 90 if step % 10 == 9 else 6))):
            name = f"{step}.{i}" if not known or rng.random() < 0.4 else str(rng.choice(list(known)))
            if any(e.request_id == name for e in entries):
                continue
            if name not in known:
                tokens, prompt = rng.integers(0, 1000, int(rng.integers(2, 400))).tolist(), int(rng.integers(1, 400))
                new.append(NewRequest(name, tokens[:prompt], tokens[prompt:], PARAMS, 0, 0))
                known[name] = {"tokens": tokens, "prompt": min(prompt, len(tokens)), "tables": ([], [])}
            request = known[name]
            start = int(rng.integers(0, len(request["tokens"])))
            kind = TokenKind.PROMPT if start < request["prompt"] else TokenKind.GENERATED
            end = request["prompt"] if kind is TokenKind.PROMPT else len(request["tokens"])
            count = int(rng.integers(1, end - start + 1)) if rng.random() < 0.5 else 1
            blocks = []
            for table, size in zip(request["tables"], sizes, strict=True):
                missing = max(0, -(-(start + count) // size) - len(table))
                blocks.append(tuple(rng.integers(0, 9999, missing).tolist()))
                table.extend(blocks[-1])
            entries.append(ScheduledEntry(name, start, count, kind, tuple(blocks), bool(rng.random() < 0.5)))
        entries.sort(key=lambda e: e.kind is TokenKind.PROMPT)
        batch.apply(SchedulerOutput(step, entries, new))
        found = batch.build(entries, (None, None))

        rows = [(known[e.request_id], p) for e in entries for p in range(e.start, e.start + e.num_tokens)]
        assert found.token_ids.tolist() == [request["tokens"][p] for request, p in rows]
        assert found.positions.tolist() == [p for _, p in rows]
        assert found.query_start_loc.tolist() == np.cumsum([0, *(e.num_tokens for e in entries)]).tolist()
        assert found.seq_lens.tolist() == [e.start + e.num_tokens for e in entries]
        assert found.num_generated == sum(e.num_tokens for e in entries if e.kind is TokenKind.GENERATED)
        ends = np.cumsum([e.num_tokens for e in entries])
        assert found.logits_rows.tolist() == [end - 1 for end, e in zip(ends, entries, strict=True) if e.sample]
        assert found.num_generated_logits == sum(e.sample and e.kind is TokenKind.GENERATED for e in entries)
        for group, size in enumerate(sizes):
            assert found.slot_mapping[group].tolist() == [r["tables"][group][p // size] * size + p % size for r, p in rows]
            assert found.block_tables[group].shape == (len(entries), max(len(known[e.request_id]["tables"][group]) for e in entries))
            for row, e in zip(found.block_tables[group], entries, strict=True):
                table = known[e.request_id]["tables"][group]
                assert row[: len(table)].tolist() == table
        arrays = (found.token_ids, found.positions, found.query_start_loc, found.seq_lens, found.logits_rows, *found.block_tables)
        assert {a.dtype for a in arrays} == {np.dtype(np.int32)} and {a.dtype for a in found.slot_mapping} == {np.dtype(np.int64)}
