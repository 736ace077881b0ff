"""The NumPy reference: the specification of every op, written to be read."""

from octavo.ops.reference.reference_ops import ReferenceOps

__all__ = ["ReferenceOps"]
