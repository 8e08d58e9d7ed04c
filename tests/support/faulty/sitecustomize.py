"""Injects faults into processes that are started with this folder on PYTHONPATH.

A prompt that contains one of the tokens below makes the worker that computes it die, raise, sleep, or run out of
memory. FAULT_AT_START, such as "raise 1", makes a rank do the first two, or the last, while it loads (rank 0 may also
be the one in the engine's process). The product has no code for this.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time

KILLER, RAISER, SLEEPER, STARVER = 4001, 4002, 4003, 4004
WORKER = "serve_llm.engine.worker.worker"


def own_rank():
    return sys.argv[sys.argv.index("--rank") + 1] if "--rank" in sys.argv else "0"


def out_of_memory(*_, **__):
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full.")


class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        start, load = module.Worker.start, module.load_model

        def faulty_load(*args, **given):
            what, _, rank = os.environ.get("FAULT_AT_START", "").partition(" ")
            if what and rank == own_rank():
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "raise":
                    raise ZeroDivisionError("simulated")
                out_of_memory()
            return load(*args, **given)

        def faulty(self, batch, masks=None):
            ids = {token_id for new in batch.new_requests for token_id in new.token_ids}
            if KILLER in ids:
                os.kill(os.getpid(), signal.SIGKILL)
            if RAISER in ids:
                raise MemoryError("simulated")
            if SLEEPER in ids:
                time.sleep(600)
            if STARVER in ids:
                self._runner._forward = out_of_memory
            return start(self, batch, masks)

        module.Worker.start = faulty
        module.load_model = faulty_load


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != WORKER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder())
