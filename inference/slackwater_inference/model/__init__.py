"""The DualAR model: a slow transformer for semantic tokens, a fast one for each frame's residual codes.

Owns the forward rules and the weights' names and shapes.  Owns no cache, no batch and no sampling.
"""
