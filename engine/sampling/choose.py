"""Chooses the sampler of a rank."""

from __future__ import annotations

from serve_llm.engine.sampling.device import DeviceSampler
from serve_llm.engine.sampling.sampler import Sampler
from serve_llm.engine.sampling.vocab_parallel import VocabParallelLogits, VocabParallelSampler
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.kernels.registry import choose_device_sampling


def build_sampler(
    vocabulary: VocabParallelLogits, copier: DeviceCopier, on_device: bool
) -> Sampler | VocabParallelSampler | DeviceSampler:
    """on_device: keep sampled ids on the device, so that the next step can start before they reach the host."""
    if on_device:
        return DeviceSampler(vocabulary, choose_device_sampling(copier.device), copier)
    sampler = Sampler(vocabulary.size, vocabulary.kernels)
    return VocabParallelSampler(sampler, vocabulary) if vocabulary.is_sharded else sampler
