"""From a Batch to sampled ids: memory, inputs, the worker of one rank, and the executors that drive workers."""
