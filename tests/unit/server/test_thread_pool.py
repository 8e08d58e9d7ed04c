"""A limit on threads gets 503 and a warning, not 500."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_llm.common.errors import CapacityError
from serve_llm.server.assemble import _in_thread
from serve_llm.server.http.errors import Unavailable
from serve_llm.server.prompt.pool import SMALL_BYTES
from serve_llm.server.storage.database import MEMORY, Database
from serve_llm.server.thread_pool import ThreadPool, run_main
from support.serving import Served


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes the system refuse all further threads."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", fail)


def test_the_threads_that_exist_do_the_work(no_threads: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    pool = ThreadPool(4)
    busy = threading.Event()
    first = pool.submit(busy.wait, 60)
    no_threads()
    others = [pool.submit(str, number) for number in range(3)]
    busy.set()
    assert first.result(60) and [other.result(60) for other in others] == ["0", "1", "2"]
    pool.shutdown()
    assert [record.getMessage() for record in caplog.records] == [
        "The system allows no further thread; raise the limit on processes (ulimit -u; TasksMax= in systemd; "
        "--pids-limit in Docker)"
    ]


def test_a_job_that_was_refused_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("cannot start")

    pool = ThreadPool(1)
    done: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", refuse)
        with pytest.raises(Unavailable, match="no further thread; try again later"):
            pool.submit(done.append, 1)
    pool.submit(done.append, 2)
    pool.shutdown()
    assert done == [2]


def test_a_large_request_gets_503(served: Served, no_threads: Callable[[], None]) -> None:
    no_threads()
    answer = served.post("/tokenize", {"prompt": "x" * SMALL_BYTES})
    assert answer.status == 503 and answer.json()["error"]["code"] == "unavailable"


def test_a_store_gets_503(no_threads: Callable[[], None]) -> None:
    database = Database(MEMORY, "CREATE TABLE t (x)", "responses-store")
    no_threads()
    with pytest.raises(Unavailable):
        asyncio.run(database.run(lambda connection: connection.execute("SELECT 1")))


def test_a_start_without_threads_is_an_error_of_capacity(no_threads: Callable[[], None], tmp_path: Path) -> None:
    no_threads()
    with pytest.raises(CapacityError, match="no further thread; raise the limit on processes"):
        asyncio.run(_in_thread(tmp_path.exists))


def test_the_loop_ends_without_threads_and_with_the_error_of_its_task(no_threads: Callable[[], None]) -> None:
    no_threads()
    with pytest.raises(Unavailable, match="no further thread"):
        run_main(asyncio.to_thread(str))


def test_the_loop_waits_for_its_threads() -> None:
    done: list[int] = []

    async def start() -> None:
        asyncio.get_running_loop().run_in_executor(None, done.append, 1)

    run_main(start())
    assert done == [1]
