"""The HTTP API: Fish Audio's contract on top of the engine.

Owns paths, bodies, keys, errors and the access log.  Does not own generation or the process's life (cli).
"""
