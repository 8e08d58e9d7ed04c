"""The app on a scripted engine, listening in a thread, for browsers. Its engine runs a step when the test asks for
it."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from serve_llm.common.errors import EngineDead
from serve_llm.common.hub import resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.server.app import create_app
from serve_llm.server.daemon import listen
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.restarts import RestartRecord
from serve_llm.server.http.connection import HttpServer
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.storage.storage import Storage
from support.fakes import ScriptedEngine, make_model_info

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60.0
HOSTS = ["host-a", "host-a", "host-b", "host-b"]  # two stages of two ranks


class PageServer:
    engine: ScriptedEngine
    replicas: Replicas

    def __init__(self) -> None:
        self.options = make_options("demo", api_key="key", tensor_parallel_size=2, pipeline_parallel_size=2)
        self.model = ServedModel.load(resolve_model("demo"), self.options)
        self.answer = ""  # the text that the model writes repeatedly
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        self.loop = asyncio.new_event_loop()
        self.http_server: HttpServer | None = None

    async def serve(self) -> None:
        shape = make_model_info(tensor_parallel_size=2, rank_hosts=HOSTS)
        self.engine = ScriptedEngine(self._write, automatic=False, model_info=shape)
        self.replicas = Replicas([self.engine])
        app, _, prompts, _ = create_app(self.replicas, self.model, self.options, Storage(None, None))
        self.http_server = HttpServer(app, self.options.limits, None, None)
        await self.http_server.serve(sockets=[self.listener])
        prompts.close()

    def _write(self, request: object) -> list[int]:
        return self.model.tokenizer.encode(self.answer, add_special_tokens=False)

    def stop(self) -> None:
        assert self.http_server is not None
        self.http_server.should_exit = True

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run work in the server's loop."""

        async def run_work() -> None:
            await work()

        asyncio.run_coroutine_threadsafe(run_work(), self.loop).result(SECONDS)

    def step(self, count: int) -> None:
        async def make_steps() -> None:
            for _ in range(count):
                self.engine.step()

        self.run(make_steps)

    def lose_engine(self, cause: str) -> None:
        """Lose the engine as the supervisor does when one dies."""

        async def lose() -> None:
            self.engine.ready = False
            self.replicas.drop_lost({0: []}, EngineDead(cause))
            self.replicas.num_restarts += 1
            self.replicas.restarts.append(RestartRecord(0, "killed", cause))

        self.run(lose)

    def replace_engine(self) -> None:
        async def join() -> None:
            old = self.engine
            self.engine = ScriptedEngine(self._write, automatic=False, model_info=old.model_info, meter=old.meter)
            self.replicas.join({0: self.engine})

        self.run(join)

    def read_prompt(self) -> str:
        """Return the newest request."""
        return self.model.tokenizer.decode(self.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


@contextmanager
def serve_page() -> Iterator[PageServer]:
    server = PageServer()
    thread = threading.Thread(target=server.loop.run_until_complete, args=(server.serve(),))
    thread.start()
    try:
        wait_until(lambda: server.http_server is not None and server.http_server.started)
        yield server
    finally:
        server.stop()
        thread.join(SECONDS)
        server.loop.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
