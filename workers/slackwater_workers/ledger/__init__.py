"""Who cleans what, and what is cleaned, in a folder that any number of workers share.

Owns the protocol of workers/README.md: claims by epoch, framed parts, done-records, verification.  Knows nothing
about audio.  The pipeline is its only writer; `status`, `verify` and `export` only read.
"""
