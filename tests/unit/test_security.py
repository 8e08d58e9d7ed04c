"""What the product must never do: run code that it was sent, or that a checkpoint contains."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("serve_llm", "cli", "common", "server", "engine", "kernels", "examples", "deploy", "tools")
PRODUCT = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# Functions that unpickle or run their input. multiprocessing and its pools pickle between processes.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "xmlrpc"}
SUBMODULES = {
    "multiprocessing.connection",
    "multiprocessing.managers",
    "multiprocessing.pool",
    "concurrent.futures.process",
}
CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("torch.load", "torch.hub.load", "torch.jit.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load"),
    *("jinja2.Template", "jinja2.Environment"),  # outside its sandbox
    *("ProcessPoolExecutor", "multiprocessing.Process", "multiprocessing.Pool", "multiprocessing.Queue"),
}
# The only call that reads pickles, in a process that can do nothing else: decision 0030.
ALLOWED = {
    "cli/convert/worker.py": "torch.load(path, map_location='cpu', weights_only=True, mmap=is_archive)",
}
WORDS = ("shell", "trust_remote_code", "allow_pickle", "recv_pyobj", "send_pyobj", "_object_list", "all_gather_object")


def problems(source: str, allowed: str = "") -> list[str]:
    """Return the forbidden calls in a module's source, with their lines. allowed: one call that is permitted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if allowed and isinstance(node, ast.Call) and ast.unparse(node) == allowed:
            allowed = ""  # permitted only once
            continue
        found += [f"line {getattr(node, 'lineno', 0)}: {what}" for what in _imported(node) + _used(node)]
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    roots = {name.partition(".")[0] for name in names}
    return [*sorted(roots & MODULES), *(name for name in names if name in CALLS or _within(name, SUBMODULES))]


def _within(name: str, modules: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _used(node: ast.AST) -> list[str]:
    """Return the call and the words used by a node, except for words that are set to False."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    word = node.attr if isinstance(node, ast.Attribute) else ""
    if isinstance(node, ast.keyword) and node.arg and ast.unparse(node.value) != "False":
        word = node.arg
    return [called] * (called in CALLS) + [word] * any(bad in word for bad in WORDS)


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_comes_from_data(path: Path) -> None:
    allowed = ALLOWED.get(path.relative_to(ROOT).as_posix(), "")
    assert problems(path.read_text(encoding="utf-8"), allowed) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "exec('x')",
        "torch.load(path)",
        "from torch import load",
        "from multiprocessing.connection import Client",
        "from concurrent.futures.process import ProcessPoolExecutor",
        "ProcessPoolExecutor(2)",
        "jinja2.Template(source)",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
        "np.load(x, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=given)",
        "os.system('ls')",
        "__import__(name)",
        "import cloudpickle as p",
        "socket.recv_pyobj()",
        "yaml.load(x)",
        "torch.distributed.broadcast_object_list(x)",
    ],
)
def test_the_check_finds_what_it_looks_for(source: str) -> None:
    assert problems(source)


def test_the_exception_is_one_call() -> None:
    (call,) = ALLOWED.values()
    assert problems(call, call) == [] and "weights_only=True" in call
    assert problems(call) == ["line 1: torch.load"]
    assert problems(f"{call}\n{call}", call) == ["line 2: torch.load"]
    assert problems(call.replace("weights_only=True", "weights_only=False"), call) == ["line 1: torch.load"]


def test_the_check_looks_at_everything() -> None:
    assert len(PRODUCT) > 150 and ROOT / "server" / "prompt" / "worker.py" in PRODUCT
