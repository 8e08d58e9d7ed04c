"""Kernels for GPUs, in Triton. Imported only where a GPU is (and by tests), since Triton is not installed elsewhere."""
