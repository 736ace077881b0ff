"""One short file per model family over layers/: a forward pass and a declarative name map; registry.py finds them.

Not here: loading, batching, sampling.
"""
