"""run: one verification from a model's name to a Report.

Loads the model, computes the baseline, runs every row of the matrix and, where one differs, both arms once more to find the layer.
Stateless. Not here: what the rows are (rows.py), printing (cli/verify.py).
"""

from __future__ import annotations

import hashlib
import logging
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import octavo
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.verify.baseline import check_memory, tapped_row
from octavo.verify.cases import make_cases
from octavo.verify.comparison import Comparison, Difference
from octavo.verify.faults import find_fault
from octavo.verify.layers import TapWatch, first_layer, tap_names
from octavo.verify.recorder import Target
from octavo.verify.report import FirstDifference, Report, RowReport
from octavo.verify.rows import FORK_CHOICES, Row, fork_cases, matrix
from octavo.verify.session import Session
from octavo.wiring import EngineParts, LoadProgress, find_model, make_config

#: Called with (what is being done, parts done, parts in all).
Progress = Callable[[str, int, int], None]
MAX_TOKENS, MAX_TOKENS_QUICK = 16, 12
#: Backends that promise bits; the others promise closeness.
BITWISE = frozenset({"cpu"})
#: Share of a row's largest logit: NumPy and torch in float32 take their sums in another order for another shape.
TOLERANCE = 1e-3
#: Torch off the CPU rounds to bfloat16.
DEVICE_TOLERANCE = 5e-2


def run(
    model: str | None = None,
    *,
    prompts: Sequence[str] | None = None,
    config: EngineConfig | None = None,
    quick: bool = False,
    max_tokens: int | None = None,
    plant: str | None = None,
    progress: Progress | None = None,
    load_progress: LoadProgress | None = None,
    **settings: Any,
) -> Report:
    """Run `model` through the whole matrix.

    prompts: texts, instead of our own. max_tokens: generated after each. quick: fewer and shorter ones. plant: a fault of
    faults.FAULTS, to test the verifier. Other settings are fields of EngineConfig.
    Raises ConfigError, InvalidRequestError (a prompt) or ModelLoadError; a difference is no error but in the Report.
    """
    started = perf_counter()
    fault = find_fault(plant)
    if max_tokens is not None and not 2 <= max_tokens <= 100_000:
        raise ConfigError(f"max_tokens must be from 2 to 100000 to verify anything, got {max_tokens}")
    config = make_config(model, config, settings)
    parts = EngineParts.load(config, load_progress)
    try:
        count = max_tokens or (MAX_TOKENS_QUICK if quick else MAX_TOKENS)
        cases = make_cases(parts.input_processor(), prompts, count, quick=quick)
        session = Session(config, cases, parts, fault, load_progress)
        with _quiet():
            return _verify(session, progress or (lambda *_: None), started)
    finally:
        parts.executor.close()


def _verify(session: Session, progress: Progress, started: float) -> Report:
    choices = {case.number: FORK_CHOICES for case in fork_cases(session)}
    _check_room(session, choices)
    rows = matrix(session)
    num_baseline = sum(choices.get(case.number, 1) for case in session.cases)
    total, done = num_baseline + len(rows), 0

    def baseline_done() -> None:
        nonlocal done
        done += 1
        progress("full recompute", done, total)

    progress("full recompute", 0, total)
    begun = perf_counter()
    with session.other(replay=False) if session.config.replay else nullcontext(session.parts) as parts:
        session.compute_baseline(parts, choices, baseline_done)
    baseline_seconds = perf_counter() - begun
    digest, positions = hashlib.sha256(), 0
    for key, row in session.baseline.rows():
        positions += 1
        digest.update(repr(key).encode())
        digest.update(row.astype("<f4", copy=False).tobytes())
    reports = []
    for row_number, one in enumerate(rows):
        progress(one.name, num_baseline + row_number, total)
        reports.append(_run_row(session, one))
    progress("", total, total)
    baseline = {
        "about": "every token from a pass over its whole prefix: no KV of earlier steps, no neighbours, no chunks",
        "choices": num_baseline,
        "positions": positions,
        "logits": positions * session.executor.info.vocab_size,
        "tokens": sum(map(len, session.baseline.tokens.values())),
        "tokens_digest": hashlib.sha256(repr(sorted(session.baseline.tokens.items())).encode()).hexdigest(),
        "seconds": round(baseline_seconds, 3),
    }
    return Report(
        model=_model_facts(session),
        engine=_engine_facts(session),
        settings={name: value for name, value in asdict(session.config).items() if name not in ("model", "event_history")},
        prompts=[
            {"tokens": case.num_prompt_tokens, "sha256": hashlib.sha256(repr(case.token_ids).encode()).hexdigest()}
            | {"max_tokens": case.params.max_tokens}
            for case in session.cases
        ],
        logits_digest=digest.hexdigest(),
        baseline=baseline,
        rows=reports,
        machine=_machine_facts(),
        seconds=perf_counter() - started,
        planted=session.fault.name or None,
    )


def _check_room(session: Session, choices: dict[int, int]) -> None:
    group = min(session.executor.info.kv_groups, key=lambda group: group.num_blocks)  # the baseline keeps whole sequences
    needed = session.blocks_for(session.longest) + 2
    if needed > group.num_blocks:
        raise ConfigError(f"the longest case needs {needed} KV blocks, the pool has {group.num_blocks}: raise kv_cache_memory")
    positions = sum(c.num_prompt_tokens + choices.get(c.number, 1) * (c.params.max_tokens or 0) for c in session.cases)
    check_memory(positions, session.executor.info.vocab_size)


# -- a row ---------------------------------------------------------------------------------------------------------
def _run_row(session: Session, row: Row) -> RowReport:
    tolerance = _tolerance(session)
    report = RowReport(row.name, row.about, _promise(row, tolerance), "holds")
    why = row.not_applicable(session)
    if why is not None:
        report.status, report.why = "does not apply", why
        return report
    begun = perf_counter()
    comparison = Comparison(session.baseline, tolerance, row.hits_allowed)
    try:
        report.counters = {name: _rounded(value) for name, value in row.run(session, comparison).items()}
    except OctavoError as error:
        report.status, report.why = "failed", str(error)
    report.positions, report.logits = comparison.positions, comparison.logits_compared
    report.tokens, report.texts = comparison.tokens_compared, comparison.texts_compared
    report.largest_difference = _finite(comparison.largest_difference)
    report.bitwise = comparison.bitwise and not comparison.differences
    report.seconds = round(perf_counter() - begun, 3)
    if report.status == "failed":
        return report
    if comparison.parted:
        report.counters["choices parted"] = comparison.parted
    idle = [name for name in row.required if not report.counters.get(name)]
    first = comparison.first
    if first is not None:
        report.status, report.why, report.num_differences = "differs", first.detail, len(comparison.differences)
        report.first = _located(session, row, first, bitwise=report.promise == "bitwise")
    elif idle or not report.positions:
        report.status = "did not fire"
        report.why = f"{' and '.join(idle) or 'positions compared'}: 0, so nothing was proved"
    report.seconds = round(perf_counter() - begun, 3)
    return report


def _tolerance(session: Session) -> float | None:
    if session.backend in BITWISE and not session.config.op_backends:
        return None
    return DEVICE_TOLERANCE if session.backend == "torch" and session.config.device != "cpu" else TOLERANCE


def _promise(row: Row, tolerance: float | None) -> str:
    if row.name == "reference":
        from octavo.verify.reference import MAX_MEAN_KL, MIN_TOP_1

        return f"mean KL at most {MAX_MEAN_KL}, equal top-1 at least {MIN_TOP_1:.0%}"
    return "bitwise" if tolerance is None else f"within {tolerance:g} of a row's largest logit"


def _located(session: Session, row: Row, found: Difference, *, bitwise: bool) -> FirstDifference:
    length = session.baseline.prompt_length(found.case)
    tokens = [*session.cases[found.case].token_ids, *session.baseline.tokens[found.case, found.choice]]
    return FirstDifference(
        prompt=found.case,
        choice=found.choice,
        position=found.position,
        kind="prompt" if found.position < length else "generated",
        what=found.what,
        detail=found.detail,
        token_id=tokens[found.position] if found.position < len(tokens) else None,
        layer=_layer(session, row, found, bitwise=bitwise),
    )


def _layer(session: Session, row: Row, found: Difference, *, bitwise: bool) -> str:
    """Where the first difference arises: a tap's name, or what lies behind the layers."""
    if found.what != "logits":
        return {"token": "sampling", "text": "text", "missing": "scheduling"}[found.what]
    config = session.parts.model_config
    if config is None:
        return "unknown"
    names = tap_names(config.num_layers)
    watch = TapWatch(Target(found.request_id, found.position, found.occurrence), frozenset(names))
    row.run(session, watch)
    if watch.values is None:
        return "unknown (the row did not run the same way twice)"
    case = session.cases[found.case]
    request = session.parts.input_processor().process("baseline", list(case.token_ids), case.params)
    tokens = session.baseline.tokens[found.case, found.choice]
    executor = session.fault.everywhere(session.executor)
    expected = tapped_row(executor, request, found.choice, tokens, found.position, frozenset(names))
    layer = first_layer(expected, watch.values, names, bitwise=bitwise)
    # taps force the eager path
    return layer or "output (the last norm or the head), or only where steps are replayed"


# -- facts ---------------------------------------------------------------------------------------------------------
def _model_facts(session: Session) -> dict[str, Any]:
    files = find_model(session.config)
    try:
        return {
            "name": Path(files.name).name,
            "architecture": files.config.architecture,
            "files": [{"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files.paths],
        }
    finally:
        if files.gguf_file is not None:
            files.gguf_file.close()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _engine_facts(session: Session) -> dict[str, Any]:
    facts = session.executor.ops.describe()
    return {"octavo": octavo.__version__, "backend": session.backend, "isa": facts.get("isa"), "device": facts.get("device")}


def _machine_facts() -> dict[str, Any]:
    import numpy

    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(line.partition(":")[2].strip() for line in file if line.lower().startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _rounded(value: int | float) -> int | float:
    return value if isinstance(value, int) else float(f"{_finite(value):.6g}")


def _finite(value: float) -> float:
    """JSON has no NaN and no infinity: the largest float stands for both."""
    return value if math.isfinite(value) else 1.7976931348623157e308


@contextmanager
def _quiet() -> Iterator[None]:
    """Rows run the engine with settings nobody would choose; its advice about them is not for the user."""
    logger = logging.getLogger("octavo")
    level = logger.level
    logger.setLevel(logging.ERROR if logger.getEffectiveLevel() > logging.INFO else level)
    try:
        yield
    finally:
        logger.setLevel(level)
