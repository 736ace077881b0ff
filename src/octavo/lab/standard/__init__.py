"""The lesson on decoding: naive, with a KV cache, with native kernels, streamed. Not here: what runs it (lab/lessons.py)."""
