"""A real Kubernetes on one machine, built from source: the control plane that tests and `make cluster-up` run.

Owns the building of its programs, the life of its processes, and the fixtures on top.  Nothing of the product imports
it.
"""
