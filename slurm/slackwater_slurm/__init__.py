"""The Slurm room: the shared policy beside a Slurm cluster."""
