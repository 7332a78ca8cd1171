"""The workers room: checkpointed, preemptible cleaning of speech recordings."""
