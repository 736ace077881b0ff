"""The operations layers may call (api.py), who runs them (registry.py), and one folder per backend.

Nothing is imported here: a backend is loaded only when it is chosen. Not here: anything about requests.
"""
