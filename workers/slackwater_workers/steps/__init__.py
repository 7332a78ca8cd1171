"""What is done to one recording: decode, resample, loudness, voice activity, manifest row.

Owns the audio.  Each step is an iterator over blocks or a small object fed with blocks, so memory is bounded
whatever the recording's length, and has a VERSION that goes into the job's fingerprint.  Knows
nothing of leases, shards or signals: `keep_going` is called between blocks and may raise.
"""
