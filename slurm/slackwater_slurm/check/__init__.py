"""Reads a site's running configuration and says what keeps preemption from being quick or lossless."""
