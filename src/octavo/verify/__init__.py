"""`octavo verify`: shows that no optimisation changes an answer of this model on this machine.

>>> from octavo import verify
>>> report = verify.run("smollm2", quick=True)
>>> report.holds, report.digest

Not here: the command line (cli/verify.py), the promises themselves (docs/numerics.md).
"""

from octavo.verify.report import Report
from octavo.verify.run import run

__all__ = ["Report", "run"]
