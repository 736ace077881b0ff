"""Runs steps: the local executor, the model runner, its memory of running requests, and the size of the KV pool.

Of the engine it knows scheduler_output.py alone. Not here: any decision about what to run.
"""
