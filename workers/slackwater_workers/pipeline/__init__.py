"""What one worker does from its start to its end.

Owns the order of things: index, claim, clean, append, commit, leave.  Called by the command line.
"""
