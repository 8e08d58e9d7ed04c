"""Memory of common GPUs, as data for `plan`. Torch-free, a leaf."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """gibibytes: what CUDA reports as the device's total memory, a little less than the name says; driver versions
    differ in the second digit after the point. nvlink: whether machines with it usually have NVLink between GPUs."""

    gibibytes: float
    nvlink: bool

    @property
    def num_bytes(self) -> int:
        return int(self.gibibytes * 2**30)


GPUS: dict[str, Gpu] = {
    "b200": Gpu(178.35, nvlink=True),
    "h200": Gpu(139.80, nvlink=True),
    "h100": Gpu(79.10, nvlink=True),
    "h20": Gpu(95.00, nvlink=True),
    "a100-80g": Gpu(79.15, nvlink=True),
    "a100-40g": Gpu(39.39, nvlink=True),
    "v100-32g": Gpu(31.73, nvlink=True),
    "v100-16g": Gpu(15.77, nvlink=True),
    "l40s": Gpu(44.39, nvlink=False),
    "a6000": Gpu(47.40, nvlink=False),
    "a10": Gpu(22.00, nvlink=False),
    "l4": Gpu(21.95, nvlink=False),
    "t4": Gpu(14.56, nvlink=False),
    "rtx-5090": Gpu(31.36, nvlink=False),
    "rtx-4090": Gpu(23.52, nvlink=False),
    "rtx-3090": Gpu(23.57, nvlink=False),
}
