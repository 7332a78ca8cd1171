"""Writes what is generated in manifests/: the dashboard, the alert rules and the Helm chart.

`make manifests` runs it; tests compare its output with the files that are committed.  Nothing that runs in a
cluster imports it.
"""
