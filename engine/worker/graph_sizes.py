"""The sizes of steps that are captured as CUDA graphs. Torch-free, because the engine loop plans with them."""

from __future__ import annotations

MIXED_TOKENS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)  # sizes of steps with prompts


def list_decode_sizes(largest: int) -> list[int]:
    """Batch sizes up to `largest`, ascending: powers of two, from 16 on in steps of 16, from 256 on in steps of 64.
    Large batches thus have only a few percent of padding rows."""
    sizes = {1, 2, 4, 8, *range(16, 256, 16), *range(256, largest + 1, 64), largest}
    return sorted(size for size in sizes if size <= largest)


def list_mixed_sequences(largest: int) -> list[int]:
    """Numbers of sequences of steps with prompts, ascending up to `largest`. There are few of them, because each needs
    a graph for each of MIXED_TOKENS, while surplus programs cost little."""
    return sorted({min(16 * 4**power, largest) for power in range(8)})
