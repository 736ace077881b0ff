"""The torch backend. Importing this package loads torch: only ops/registry.py does, when the backend was asked for."""

from octavo.ops.torch.torch_ops import TorchOps

__all__ = ["TorchOps"]
