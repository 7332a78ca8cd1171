"""The keeper: a process that reads one ledger for an operator which cannot mount it.

Owns no work and writes nothing.
"""
