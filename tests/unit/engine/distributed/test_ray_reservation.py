"""When a placement group is released. Runs in a separate process, because Ray changes the process that imports it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.ray_nodes import skip_without_ray

SCRIPT = """
import sys
from serve_llm.engine.distributed.ray import cluster
from serve_llm.engine.distributed.ray.placement import RayNode

states, free, expected = sys.argv[1].split(), int(sys.argv[2]), sys.argv[3] == "True"
place = RayNode("a", "192.0.2.1", 4, 4)


class Group:
    def wait(self, seconds):
        assert seconds == int(seconds), "Ray waits for whole seconds"
        return states[0] == "CREATED"


def look(kind):
    return [RayNode("a", "192.0.2.1", 4, free)]


def pass_time(seconds):
    states[:] = states[1:] or states


cluster._nodes = look
cluster.placement_group_table = lambda group: {"state": states[0]}
cluster.time.sleep = pass_time
cluster.CREATE_SECONDS = 0.2 if states[-1] == "PREPARED" else 60.0
assert cluster._is_created(Group(), [place, place], "CPU") is expected
"""


@pytest.mark.parametrize(
    ("states", "free", "expected"),
    [
        ("CREATED", 2, True),
        ("PENDING PENDING PENDING PENDING PENDING PENDING CREATED", 2, True),
        ("PREPARED PREPARED PREPARED PREPARED PREPARED PREPARED CREATED", 0, True),  # it has taken them itself
        ("PENDING PENDING PREPARED PENDING PREPARED PREPARED CREATED", 0, True),
        ("PENDING", 0, False),
        ("PREPARED", 0, False),
    ],
)
def test_a_group_is_given_up_when_others_have_its_devices(states: str, free: int, expected: bool) -> None:
    skip_without_ray()
    command = [sys.executable, "-P", "-c", SCRIPT, states, str(free), str(expected)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
