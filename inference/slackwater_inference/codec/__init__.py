"""The neural codec: sound to codes, codes to sound.

Owns the network, its weights' names and the state a stream carries.  Does not own when a chunk is due.
"""
