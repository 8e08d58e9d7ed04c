"""Freed tensors are used again without new pages, and an idle process returns them."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

# In a process of its own, because the settings are those of the process.
CODE = """
import json, resource
import psutil, torch
from serve_llm.engine.worker.freed_memory import keep_freed_memory, return_freed_memory

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        tensors = [torch.ones(5 << 20) for _ in range(3)]  # 20 MiB each
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
count_faults()
faults = count_faults()
kept = psutil.Process().memory_info().rss
return_freed_memory()
print(json.dumps([faults, kept - psutil.Process().memory_info().rss]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_tensors_are_used_again_until_the_process_is_idle() -> None:
    printed = subprocess.run([sys.executable, "-P", "-c", CODE], check=True, capture_output=True, text=True).stdout
    faults, returned = json.loads(printed)
    assert faults < 1000  # 600 MiB have 153,600 pages of 4 KiB
    assert returned > 40 << 20
