"""A rank that nobody on its host watches over."""

from __future__ import annotations

import subprocess
import sys

from serve_llm.engine.errors import EngineError
from serve_llm.engine.execute import control
from serve_llm.engine.parallel.encrypted import Endpoint

LIMIT = 60.0


def test_it_says_that_it_lives_and_ends_with_the_engine() -> None:
    endpoint = Endpoint("127.0.0.1", "secret")
    router, url = endpoint.listen()
    program = f"from serve_llm.engine.execute.rank import end_with_engine; end_with_engine({url!r}, 'secret', 3)"
    with subprocess.Popen([sys.executable, "-P", "-c", program], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert router.poll(LIMIT * 1000)
            assert control.decode_from_rank(router.recv_multipart()[1]) == control.Alive(3)
            assert process.poll() is None
            endpoint.close()
            _, log = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
            endpoint.close()
    assert process.returncode == EngineError.exit_code and "rank 3 ends: the connection to 127.0.0.1:" in log
