"""What outlives a request: voices, API keys, usage.

Owns objects (a folder or S3) and rows (SQLite or PostgreSQL).  Owns no HTTP.
"""
