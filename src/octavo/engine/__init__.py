"""Requests, scheduling, KV accounting and text: everything between a caller and an executor. No arrays, no torch.

Each module names its own state. Not here: computing (worker/), the wiring (llm.py).
"""
