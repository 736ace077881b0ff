"""Quantisation schemes: each file turns one family of file formats into the packed layouts of ops/api.py."""
