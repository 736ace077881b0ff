"""The committed experiments: scripts that measure and write results/*.json. Run one as `python -m benchmarks.NAME`.

Not here: how things are measured and recorded (src/octavo/bench), what the figures mean (docs/benchmarks.md).
"""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
