"""Sources of GPU kernels: one module per backend; `kernels.registry` combines them."""
