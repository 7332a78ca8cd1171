"""Real Kubernetes nodes on one machine: kubelet, containerd and runc of each node in namespaces of their own."""
