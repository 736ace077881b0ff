"""pytest plugin of tools/sanitize.sh: puts the instrumented native module in the place of the installed one.

Owner of nothing; works once, when pytest loads it. OCTAVO_SANITIZED names the built file.
"""

import importlib.util
import os
import sys

import octavo

_spec = importlib.util.spec_from_file_location("octavo._native", os.environ["OCTAVO_SANITIZED"])
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules["octavo._native"] = octavo._native = _module  # type: ignore[attr-defined]
