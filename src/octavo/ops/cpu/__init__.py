"""The native backend: CpuOps over the compiled module octavo._native. Import it only where that module exists
(ops/registry.py decides)."""

from octavo.ops.cpu.cpu_ops import CpuOps

__all__ = ["CpuOps"]
