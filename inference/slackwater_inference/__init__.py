"""The inference room: a DualAR text-to-speech engine, its HTTP API and the gateway before it."""
