"""What the product's code must never do: run what it was sent, or what a checkpoint holds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = sorted(
    path for folder in ("serve_llm", "server", "engine", "kernels") for path in (ROOT / folder).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "xmlrpc"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    ("torch", "load"),
    ("torch", "compile"),
    ("np", "load"),
    ("numpy", "load"),
    ("os", "system"),
    ("yaml", "load"),
}
METHODS |= {
    ("torch.hub", "load"),
    ("socket", "recv_pyobj"),
    ("socket", "send_pyobj"),
    ("dist", "broadcast_object_list"),
}
WORDS = ("shell", "trust_remote_code", "allow_pickle", "recv_pyobj", "send_pyobj", "_object_list", "all_gather_object")
ALLOWED_CALLS = {("re", "compile"), ("torch", "compile")}  # patterns; our own functions


def problems(source: str) -> list[str]:
    """What in a module's source is forbidden, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        found += [f"line {node.lineno}: imports {name}" for name in names if name in MODULES]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, name = called.rpartition(".")
            if (called in BUILTINS) or ((owner, name) in METHODS - ALLOWED_CALLS):
                found.append(f"line {node.lineno}: calls {called}")
        words = []
        if isinstance(node, ast.keyword) and node.arg and ast.unparse(node.value) != "False":
            words = [node.arg]
        elif isinstance(node, ast.Attribute):
            words = [node.attr]
        found += [f"line {node.lineno}: {word}" for word in words if any(bad in word for bad in WORDS)]
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_comes_from_data(path: Path) -> None:
    assert problems(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "exec('x')",
        "torch.load(path)",
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


def test_the_check_looks_at_everything() -> None:
    assert len(PRODUCT) > 150 and ROOT / "server" / "prompt" / "worker.py" in PRODUCT
