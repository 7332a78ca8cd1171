"""A Kubernetes cluster as a `Cluster`: observed from caches, changed by few writes, rebuilt from what is there.

Owns the adapter only.  It decides nothing (`policy`), runs no loop (`operate`) and owns no API client (`kube`).
"""
