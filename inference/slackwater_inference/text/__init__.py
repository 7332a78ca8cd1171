"""From a caller's text to what the model reads: normalising, parts, tokens, prompt, frame budget.

Owns words and ids.  Owns no audio and no tensor.
"""
