"""What a run was made of: recorded steps as a file, as a timeline to look at, and as an explanation of one request.

Reads the engine's events and nothing else; loads no model. Not here: recording (engine/events.py), the commands (cli/trace.py,
cli/explain.py).
"""

from octavo.trace.explain import Explanation, explain
from octavo.trace.record import Trace, read, write

__all__ = ["Explanation", "Trace", "explain", "read", "write"]
