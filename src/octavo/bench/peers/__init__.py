"""What a peer's own interpreter runs for `octavo bench compare`: runner.py, and one file for each engine.

The files are started by path, with `python -I`: nothing of Octavo is imported there but octavo_peer.py's public API.
Not here: who starts them (peer_process.py), what is asked of them (comparison.py).
"""
