"""Which GPUs an engine claims, with folders in place of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_llm.common.errors import CapacityError
from serve_llm.engine.devices import VISIBLE_DEVICES, claim_gpus, list_gpus


def host(folder: Path, num_gpus: int) -> Path:
    """Return a /dev with this many GPUs and other files."""
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{number}" for number in range(num_gpus))):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("num_gpus", "visible", "names"),
    [
        (0, None, []),
        (0, "0,1", []),
        (3, None, ["0", "1", "2"]),
        (12, "5, 2,11", ["5", "2", "11"]),
        (4, "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        (1, "MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
        (4, "", []),
        (4, "1,-1,2", ["1"]),
    ],
)
def test_names(tmp_path: Path, num_gpus: int, visible: str | None, names: list[str]) -> None:
    assert list_gpus(visible, host(tmp_path, num_gpus)) == names


@pytest.mark.parametrize("per_engine", [1, 2, 4])
@pytest.mark.parametrize("visible", [None, "7,6,5,4,3,2,1,0"])
def test_engines_share_out_the_visible_gpus(tmp_path: Path, per_engine: int, visible: str | None) -> None:
    devices, given = host(tmp_path, 8), {} if visible is None else {VISIBLE_DEVICES: visible}
    claimed = []
    for engine in range(8 // per_engine):
        environ = dict(given)
        claim_gpus(environ, engine, 8 // per_engine, per_engine, devices)
        assert environ[VISIBLE_DEVICES].count(",") == per_engine - 1
        claimed += environ[VISIBLE_DEVICES].split(",")
    assert claimed == list_gpus(visible, devices)


def test_one_engine_and_a_host_without_gpus_are_left_alone(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    claim_gpus(environ, 1, 2, 1, host(tmp_path, 0))
    claim_gpus(environ, 0, 1, 8, host(tmp_path, 4))
    assert environ == {}


def test_too_few_are_an_error(tmp_path: Path) -> None:
    devices = host(tmp_path, 8)
    with pytest.raises(CapacityError, match=r"^--data-parallel-size: 3 engines need 6 GPUs, but 5 can be seen"):
        claim_gpus({VISIBLE_DEVICES: "0,1,2,3,4"}, 0, 3, 2, devices)
