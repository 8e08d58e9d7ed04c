"""examples/ on a local Ray, on CPUs, with what `pip install '.[examples]'` installs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 180.0


def missing(*modules: str) -> list[str]:
    """Return whether a module is missing, without importing it: importing Ray starts threads and warns."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


# Dependencies of Ray's extras `data` and `serve`.
needs_data = pytest.mark.skipif(bool(missing("ray", "pyarrow", "pandas")), reason="ray[data] is not installed")
needs_serve = pytest.mark.skipif(bool(missing("ray", "aiohttp", "watchfiles")), reason="ray[serve] is not installed")
pytestmark = pytest.mark.slow


class Driver:
    """A Python process with its own small Ray, whose home and temporary files are in `folder`.

    It also runs there: Ray puts the driver's working directory on its workers' sys.path, and in the repository's root
    the folder `serve_llm` would hide the package.
    """

    def __init__(self, folder: Path, code: str, *arguments: str, **more: str) -> None:
        """more: environment variables."""
        begin = f"""
            import ray
            ray.init(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False,
                     configure_logging=False, _temp_dir={str(folder / "ray")!r})
        """
        self.home = folder / "home"
        self.home.mkdir()
        path = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | {
            "HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONSAFEPATH": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **more,
        }
        environ.pop("RAY_ADDRESS", None)
        program = textwrap.dedent(begin) + textwrap.dedent(code)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=folder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def finish(self, said: str = "") -> tuple[int, str]:
        """Return exit code and errors once it has ended; `said` is sent to its standard input."""
        _, errors = self.process.communicate(said, timeout=SECONDS)
        return self.process.returncode, errors

    def engines(self) -> list[int]:
        """Return the engine processes under this Ray: those with its home."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            except OSError:  # it has ended
                continue
            if b"serve_llm.engine" in command and f"HOME={self.home}\0".encode() in environ:
                found.append(int(folder.name))
        return found

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create a folder with a short path: it holds Ray's sockets, and a socket's path has at most 107 characters, for
    which pytest's folders are too deep."""
    with tempfile.TemporaryDirectory(prefix="sl-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@needs_data
def test_offline_batch(folder: Path) -> None:
    rows = [{"id": number, "prompt": f"def f{number}():\n"} for number in range(5)] + [
        {"id": 5, "prompt": "x " * 20_000}
    ]
    prompts, output = folder / "prompts.jsonl", folder / "output"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = """
        import runpy, sys
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    script = str(EXAMPLES / "offline_batch_ray_data.py")
    arguments = ["demo", "--device", "cpu", "--prompts", str(prompts), "--output", str(output), "--max-tokens", "8"]
    with Driver(folder, code, script, *arguments) as driver:
        exit_code, errors = driver.finish()
        assert exit_code == 0, errors
        assert driver.engines() == []
    lines = [line for path in output.iterdir() for line in path.read_text().splitlines()]
    answers = {row["id"]: row for row in map(json.loads, lines)}
    assert sorted(answers) == list(range(6))
    assert all(answers[number]["text"] and not answers[number]["error"] for number in range(5))
    assert answers[5]["text"] == "" and "2048 tokens" in answers[5]["error"]


SERVE = """
    import sys
    from ray import serve
    import ray_serve

    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(ray_serve.build_app({"model": "demo", "device": "cpu", "served_model_name": "demo"}))
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
"""


def complete(url: str, key: str = "key", **more: object) -> str:
    body = {"model": "demo", "prompt": "import", "max_tokens": 8, "temperature": 0, **more}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


@needs_serve
def test_ray_serve(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # Ray Serve cannot choose a free port itself
    url = f"http://127.0.0.1:{port}/v1/completions"
    with Driver(folder, SERVE, str(port), SERVE_LLM_API_KEY="key") as driver:
        assert driver.process.stdout is not None
        assert any("ready" in line for line in driver.process.stdout), driver.finish()[1]
        text = json.loads(complete(url))["choices"][0]["text"]
        long = {"max_tokens": 500, "ignore_eos": True}  # exceeds one event, however busy the machine is
        events = complete(url, stream=True, **long).split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        long_text = json.loads(complete(url, **long))["choices"][0]["text"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == long_text
        assert "data: [DONE]" in events and len(chunks) > 1
        with pytest.raises(urllib.error.HTTPError, match="400"):
            complete(url, max_tokens=-1)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            complete(url, "another key")

        (engine,) = driver.engines()
        os.kill(engine, signal.SIGKILL)  # the replica's health check fails, and Ray Serve replaces it
        assert text_again(url) == text
        (replaced,) = driver.engines()
        assert replaced != engine
        exit_code, errors = driver.finish("stop")
        assert exit_code == 0, errors
        assert driver.engines() == []


def text_again(url: str) -> str:
    """Return the text as soon as it is available again."""
    limit = time.monotonic() + SECONDS
    while True:
        try:
            return str(json.loads(complete(url))["choices"][0]["text"])
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < limit
            time.sleep(0.1)


@needs_serve
def test_where_a_replica_is_placed(folder: Path) -> None:
    """A replica that fits on a node holds its devices itself; one with stages has a bundle for each."""
    code = """
        import ray_serve
        assert ray_serve.place_by_stage({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}) == {
            "ray_actor_options": {"num_cpus": 1},
            "placement_group_bundles": [{"CPU": 1}, {"CPU": 1, "GPU": 8}, {"CPU": 1, "GPU": 8}],
            "placement_group_strategy": "PACK",
        }
        assert ray_serve.place_on_one_node({"tensor_parallel_size": 2, "device": "cpu"}) == {
            "ray_actor_options": {"num_cpus": 2, "num_gpus": 0},
        }
        from serve_llm.common.errors import OptionError
        try:
            ray_serve.build_app({"model": "demo", "max_model_length": 5})
        except OptionError as error:
            assert "max_model_len" in str(error)
        else:
            raise AssertionError("not refused")
    """
    with Driver(folder, code) as driver:
        exit_code, errors = driver.finish()
        assert exit_code == 0, errors
