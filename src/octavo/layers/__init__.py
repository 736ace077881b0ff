"""The parts models are made of: plain classes that hold weights and compute only through an Ops object.

Not here: arithmetic (ops/), reading weights (loading/), whole models (models/).
"""
