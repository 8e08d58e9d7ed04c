"""Data-parallel engines on a Ray cluster: same tokens as one rank, each engine on one node, and no stream is lost with
a node."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.daemon import SERVE_LLM, Daemon
from support.front_end_load import Clients
from support.namespaces import Machines
from support.nodes import LIMIT, PROMPTS, SMALL, body, complete
from support.ray_machines import HEALTH_CHECKS, RAY, serve_on, short_folder, start_ray, wait_until
from support.ray_nodes import RayNodes, skip_without_ray
from support.remote_streams import crowd, list_leftovers, start_streams, stream_here, texts_of
from support.tiny import make_served_checkpoint

KEY = "admin:test"


@pytest.mark.slow
@pytest.mark.parametrize(("engines", "split"), [(4, ("-tp", "2")), (2, ("-pp", "2", "-tp", "2"))])
def test_engines_that_start_together_have_a_node_each(
    engines: int, split: tuple[str, ...], continuations: list[str]
) -> None:
    with short_folder() as folder, RayNodes([4, 4], folder) as nodes:
        with Daemon("demo", *SMALL, *RAY, "-dp", str(engines), *split, environ=nodes.environ) as daemon:
            assert complete(daemon.wait_until_serving()) == continuations
            groups = nodes.ask("groups")
            assert len(groups) == engines and all(len(set(group)) == 1 for group in groups)
            assert (
                sorted(sum(group[0] == node for group in groups) for node in {group[0] for group in groups})
                == [engines // 2] * 2
            )
        wait_until(lambda: nodes.ask("free") == 8, "all devices are free again")


@pytest.mark.slow
def test_engines_come_and_go_under_load() -> None:
    options = (*SMALL, *RAY, "-tp", "2", "--data-parallel-max", "4", "--api-key", KEY)
    with short_folder() as folder, RayNodes([2, 2, 2], folder) as nodes:
        with Daemon("demo", *options, environ=nodes.environ) as daemon:
            daemon.wait_until_serving()
            with Clients(daemon, 4, (4, 24, 200), headers={"authorization": f"Bearer {KEY}"}) as clients:
                clients.wait_for(4)
                assert scale(daemon, 3) == ""
                groups = nodes.ask("groups")
                assert len({node for group in groups for node in group}) == 3, "each engine is on a node of its own"
                clients.wait_for(20)
                refused = scale(daemon, 4)
                assert "2 ranks need 2 CPUs, but the Ray cluster has 6, of which 0 are free" in refused
                assert scale(daemon, 1) == ""
                wait_until(lambda: nodes.ask("free") == 4, "devices of removed engines are free again")
                clients.wait_for(4)
            assert not clients.load.wrong and not clients.load.lost


def scale(daemon: Daemon, engines: int) -> str:
    """Return what the command prints on standard error if it fails."""
    command = [SERVE_LLM, "scale", daemon.url, "--api-key", KEY, "--data-parallel-size", str(engines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    return done.stderr if done.returncode else ""


@pytest.mark.slow
@pytest.mark.parametrize("split", [pytest.param((), marks=pytest.mark.long), ("-pp", "2")])
def test_experts_on_several_nodes(split: tuple[str, ...], tmp_path: Path) -> None:
    """Streams wait for the experts of a lost node, and continue once another one has joined the cluster."""
    skip_without_ray()
    log = tmp_path / "log"
    experts = make_served_checkpoint(tmp_path / "model", "qwen3_moe")
    with Daemon(experts, "--served-model-name", "demo", *SMALL) as alone:
        undisturbed = stream_here(alone.wait_until_serving(), crowd(max_tokens=300))
    with short_folder() as folder, Machines(4, private=[str(folder)]) as machines:
        head, first, lost, spare = machines
        ranks = 2 if split else 1
        start_ray(head, folder, 0)
        start_ray(first, folder, ranks, head.address)
        start_ray(lost, folder, ranks, head.address)
        options = ("-dp", "2", "--enable-expert-parallel", *split)
        daemon, url = serve_on(head, folder, log, *SMALL, *options, model=experts)
        client = start_streams(head, url, crowd(max_tokens=300))
        lost.power_off()
        wait_until(lambda: "engines that share experts with it are replaced" in log.read_text(), "the loss")
        start_ray(spare, folder, ranks, head.address)
        assert texts_of(client) == undisturbed, log.read_text()
        head.signal(daemon, signal.SIGTERM)
        assert daemon.wait(LIMIT) == 0, log.read_text()
        for machine in (head, first, spare):
            with contextlib.suppress(ProcessLookupError):
                assert list_leftovers(machine) == "[]"


@pytest.mark.slow
def test_a_node_that_is_lost_takes_its_engine_and_another_brings_it_back(tmp_path: Path) -> None:
    skip_without_ray()
    log = tmp_path / "log"
    with short_folder() as folder, Machines(4, private=[str(folder)]) as machines:
        head, first, lost, spare = machines
        start_ray(head, folder, 0)
        start_ray(first, folder, 2, head.address)
        start_ray(lost, folder, 2, head.address)
        daemon, url = serve_on(head, folder, log, *SMALL, "-dp", "2", "-tp", "2")
        undisturbed = texts_of(start_streams(head, url, crowd()))
        client = start_streams(head, url, crowd())
        lost.power_off()
        assert texts_of(client) == undisturbed
        wait_until(lambda: re.search(r"engine \d: rank [01] .* died in a step by loss of", log.read_text()), "the loss")
        start_ray(spare, folder, 2, head.address)
        wait_until(lambda: "The engine is ready again" in log.read_text(), "the engine is back")
        assert re.search(rf"Ray places ranks 0-1 on {spare.address}", log.read_text())
        assert texts_of(start_streams(head, url, crowd())) == undisturbed
        head.signal(daemon, signal.SIGTERM)
        assert daemon.wait(LIMIT) == 0, log.read_text()
        for machine in (head, first, spare):
            with contextlib.suppress(ProcessLookupError):
                assert list_leftovers(machine) == "[]"


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_cpus", "split"),
    [
        ((4, 4), ("-tp", "2")),
        ((4, 4), ("-pp", "2")),
        ((3, 3, 2), ("-tp", "2")),  # one engine, on two nodes
        ((3, 3, 2), ("-pp", "2")),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_every_shape_survives_the_loss_of_the_last_node(
    num_cpus: Sequence[int], split: tuple[str, ...], continuations: list[str], tmp_path: Path
) -> None:
    """Four engines. num_cpus: of each node, the head first. What is lost with the last node cannot be replaced."""
    skip_without_ray()
    log = tmp_path / "log"
    bodies = crowd(max_tokens=300)
    with short_folder() as folder, Machines(len(num_cpus), private=[str(folder)]) as machines:
        head, *others = machines
        start_ray(head, folder, num_cpus[0], **HEALTH_CHECKS)
        for machine, count in zip(others, num_cpus[1:], strict=True):
            start_ray(machine, folder, count, head.address)
        daemon, url = serve_on(head, folder, log, *SMALL, "-dp", "4", *split)
        assert len(set(re.findall(r"engine (\d): Ray places", log.read_text()))) == 4
        complete_bodies = [json.loads(body(prompt=prompt)) for prompt in PROMPTS]
        assert texts_of(start_streams(head, url, complete_bodies)) == continuations
        undisturbed = texts_of(start_streams(head, url, bodies))
        client = start_streams(head, url, bodies)
        others[-1].power_off()
        assert texts_of(client) == undisturbed, log.read_text()
        head.signal(daemon, signal.SIGTERM)
        assert daemon.wait(LIMIT) == 0, log.read_text()
        for machine in (head, *others[:-1]):
            with contextlib.suppress(ProcessLookupError):
                assert list_leftovers(machine) == "[]"
