"""Ray's messages about the end of actors, and our errors; and whether Ray slows its actors down. The messages are those
of Ray 2.60, shortened at the dots."""

from __future__ import annotations

import pytest

from serve_llm.common.errors import HostLost

pytest.importorskip("ray")

from serve_llm.engine.distributed.ray.actors import _describe_death, _find_load_error, is_niced_by_ray

DIED = (
    "The actor died unexpectedly before finishing this task. class_name: RankActor ... ip: 10.0.0.1 The actor is dead "
    "because its {}"
)
KILLED = DIED.format(
    "worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer "
    "due to high memory usage, (2) ray stop --force was called, or (3) ..."
)
LEFT = DIED.format(
    "worker process has died. Worker exit type: INTENDED_USER_EXIT Worker exit detail: Worker exits by an user request."
)
NODE = DIED.format("node has died. Node Id: 12ab The actor's node was terminated unexpectedly ...")
MEMORY = DIED.format(
    "worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node "
    "running low on memory."
)
IMPORT = (
    "The actor died because of an error raised in its creation task, ray::RankActor.__init__() (pid=1, ip=10.0.0.1, "
    "repr=<...>) ^^^^ RuntimeError: The actor with name RankActor failed to import on the worker. This may be because "
    "needed library dependencies are not installed in the worker environment: ray::RankActor.__init__() (pid=1) ^^^^ "
    "ModuleNotFoundError: No module named 'serve_llm'"
)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (KILLED, "end of its process, killed or crashed; its node may be out of memory"),
        (LEFT, "end of its process: Worker exits by an user request."),
        (NODE, "loss of its node"),
        (MEMORY, "Ray, because its node runs low on memory"),
    ],
)
def test_deaths(said: str, cause: str) -> None:
    death = _describe_death(said)
    assert str(death) == cause and isinstance(death, HostLost) == (said == NODE)
    assert _find_load_error(said) is None


def test_a_node_without_serve_llm() -> None:
    assert _find_load_error(IMPORT) == (
        "ModuleNotFoundError: No module named 'serve_llm'; the same serve-llm must be installed on all nodes"
    )


@pytest.mark.parametrize(
    ("niceness", "environ", "expected"),
    [
        (15, {}, True),
        (0, {}, False),
        (5, {"RAY_worker_niceness": "0"}, False),  # `nice -n 5 ray start`
        (8, {"RAY_worker_niceness": "3"}, False),
    ],
)
def test_advice_about_niceness_is_for_rays_default_only(niceness: int, environ: dict[str, str], expected: bool) -> None:
    assert is_niced_by_ray(niceness, environ) == expected
