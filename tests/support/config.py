"""An engine's settings, for tests that need settings but no model."""

from serve_llm.engine.config import Config

CONFIG = Config(
    directory="/models/demo",
    load_format="auto",
    device="cpu",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=8,
    kv_cache_memory=None,
    gpu_memory_utilization=0.9,
    enable_prefix_caching=True,
    seed=0,
)
