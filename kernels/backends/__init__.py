"""Where a GPU's kernels come from: one module per backend, laid over each other by `kernels.registry`."""
