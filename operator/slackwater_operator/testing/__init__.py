"""What tests of this room stand on: snapshots in a few words (`cases`), stand-in child processes (`children`)."""
