"""The lesson on attention: three ways to compute one formula, and the engine's own. Not here: what runs it (lab/lessons.py)."""
