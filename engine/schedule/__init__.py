"""Which sequences compute how many tokens in the next step, and in which KV blocks. Pure Python: no torch, no clock."""
