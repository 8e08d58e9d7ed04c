"""Kernels for GPUs, in Triton. Imported only if there is a GPU (and by tests), because Triton may not be installed
elsewhere."""
