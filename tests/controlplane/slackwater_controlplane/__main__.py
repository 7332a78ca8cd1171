"""`python -m slackwater_controlplane`."""

from slackwater_controlplane.cli import app

app()
