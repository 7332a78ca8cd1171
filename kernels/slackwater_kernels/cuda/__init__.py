"""Kernels in CUDA C++: sources, the cubins that are shipped, what these were made from, and the way to launch them."""
