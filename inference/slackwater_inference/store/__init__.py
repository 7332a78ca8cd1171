"""What outlives a request: voices, API keys, usage.

Owns objects (a folder or S3) and rows (SQLite or PostgreSQL).  Owns no HTTP and no event loop: every call
blocks, and callers on a loop make it in a thread.
"""
