"""Faults from outside, for processes that are started with this folder on PYTHONPATH: a prompt that holds one of the
tokens below makes the worker that computes it die, raise, or sleep. Nothing of the product knows of this."""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time

KILLER, RAISER, SLEEPER = 4001, 4002, 4003
WORKER = "serve_llm.engine.execute.worker"


class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        execute = module.Worker.execute

        def faulty(self, batch):
            ids = {token_id for row in batch.new_rows for token_id in row.ids}
            if KILLER in ids:
                os.kill(os.getpid(), signal.SIGKILL)
            if RAISER in ids:
                raise MemoryError("simulated")
            if SLEEPER in ids:
                time.sleep(600)
            return execute(self, batch)

        module.Worker.execute = faulty


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != WORKER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder())
