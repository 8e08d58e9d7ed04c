"""Several "machines" on this one: each has its own network, mount, process, name and IPC namespaces, on one bridge.

A machine has its own address (10.77.0.1, 10.77.0.2, ...), host name and /dev/shm, sees only its own processes, and
shares the files. Nothing leaves the bridge. Faults are routing rules of the receiving machine that drop packets
silently, like a firewall or a broken link, so the sender notices them as in a real network.

Needs root, iproute2 and util-linux; if something is missing, `Machines` skips the test with the reason.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_serial = itertools.count()


def why_not() -> str | None:
    """Return why namespaces cannot be used here; None if they can."""
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian packages iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    run = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "true"], capture_output=True, text=True
    )
    return None if run.returncode == 0 else f"namespaces are not allowed here: {run.stderr.strip()}"


def _ip(*arguments: str) -> None:
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, f"ip {' '.join(arguments)}: {run.stderr}"


class Machine:
    """One machine. Created by `Machines`."""

    def __init__(self, number: int, space: str, address: str, shm_size: str, private: Sequence[str]) -> None:
        self.number, self.space, self.address, self.name = number, space, address, f"host{number}"
        self.on = True
        self._processes: list[subprocess.Popen[str]] = []
        self._rules: list[tuple[str, ...]] = []
        folders = "".join(f"mkdir -p {folder} && mount -t tmpfs tmpfs {folder} && " for folder in private)
        script = (
            f"hostname {self.name} && mount -t tmpfs -o size={shm_size} tmpfs /dev/shm && {folders} echo ready && "
            "while read -r line; do :; done"  # lasts until the test's process is gone, however it ended
        )
        spaces = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        command = ["ip", "netns", "exec", space, *spaces, "--propagation", "private", "sh", "-c", script]
        self._init = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._init.stdout is not None and self._init.stdout.readline() == "ready\n", "a machine does not start"
        self._inside = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()[0]
        # By default, the rule for the machine's own addresses comes first; faults must come before it.
        self.ip("rule", "add", "pref", "100", "lookup", "local")
        self.ip("rule", "del", "pref", "0")

    def ip(self, *arguments: str) -> None:
        """Run an `ip` command in this machine's network."""
        _ip("-n", self.space, *arguments)

    def popen(self, *command: str, env: dict[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
        """Start a command on the machine, in the root directory; the process that is returned ends with it."""
        # nsenter waits for the command, its child; setpriv makes the child end with it.
        entered = ["nsenter", "--target", self._inside, "--mount", "--net", "--pid", "--uts", "--ipc", "--wd=/"]
        wrapped = [*entered, "setpriv", "--pdeathsig", "KILL", *command]
        environ = os.environ | (env or {})
        process: subprocess.Popen[str] = subprocess.Popen(wrapped, text=True, env=environ, **options)  # type: ignore[call-overload]
        self._processes.append(process)
        return process

    def run(
        self, *command: str, env: dict[str, str] | None = None, seconds: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine to its end."""
        process = self.popen(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{command} took more than {seconds} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        """Signal the command that `popen` started; signals to the process itself do not reach it."""
        (inside,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(inside), number)

    def drop(self, *match: str) -> None:
        """Silently drop incoming packets that match, in the syntax of `ip rule`: ("from", address), ("ipproto", "tcp",
        "dport", "5000-5010")."""
        rule = ("iif", "eth0", *match, "blackhole")
        self.ip("rule", "add", "pref", "10", *rule)
        self._rules.append(rule)

    def restore(self) -> None:
        """Stop dropping packets."""
        while self._rules:
            self.ip("rule", "del", "pref", "10", *self._rules.pop())

    def close_port(self, port: int) -> None:
        self.drop("ipproto", "tcp", "dport", str(port))

    def set_mtu(self, size: int) -> None:
        """Set the interface's own MTU, which the machine knows."""
        self.ip("link", "set", "eth0", "mtu", str(size))

    def unplug(self) -> None:
        self.ip("link", "set", "eth0", "down")

    def plug(self) -> None:
        self.ip("link", "set", "eth0", "up")

    def power_off(self) -> None:
        """End all its processes at once, without notifying anyone."""
        if self.on:
            self.on = False
            self.unplug()  # first: its kernel must not close connections
            os.kill(int(self._inside), signal.SIGKILL)

    def close(self) -> None:
        for process in (self._init, *self._processes):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


class Machines:
    """A context manager: N machines on one bridge, removed at the end with everything that runs on them."""

    def __init__(
        self, number: int, *, subnet: str = "10.77.0", shm_size: str = "1g", private: Sequence[str] = ()
    ) -> None:
        """private: folders that start empty and are private to each machine, such as /tmp/ray."""
        self._number, self._subnet, self._shm_size, self._private = number, subnet, shm_size, private
        self._prefix = f"t{os.getpid():x}-{next(_serial)}"  # so that simultaneous test runs do not conflict
        self._machines: list[Machine] = []
        self._spaces: list[str] = []

    def __getitem__(self, number: int) -> Machine:
        return self._machines[number]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __enter__(self) -> Machines:
        if reason := why_not():
            pytest.skip(reason)
        try:
            self._bridge = self._add_space("br")
            _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "br0", "up")
            for number in range(self._number):
                self._machines.append(self._add_machine(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add_space(self, name: str) -> str:
        space = f"{self._prefix}-{name}"
        _ip("netns", "add", space)
        self._spaces.append(space)
        return space

    def _add_machine(self, number: int) -> Machine:
        space, port = self._add_space(str(number)), f"ve{number}"
        _ip("link", "add", port, "netns", self._bridge, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self._bridge, "link", "set", port, "master", "br0", "up")
        address = f"{self._subnet}.{number + 1}"
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _ip("-n", space, "link", "set", interface, "up")
        return Machine(number, space, address, self._shm_size, self._private)

    def cut(self, source: int, target: int) -> None:
        """Drop everything that source sends to target; the other direction still works."""
        self[target].drop("from", self[source].address)

    def set_path_mtu(self, number: int, size: int) -> None:
        """Silently lose larger packets to and from the machine while its own interface still says 1500, like a switch
        or tunnel with a smaller MTU whose ICMP is filtered."""
        # Forwarding between the ends of a cable checks the receiver's MTU, but not for segments that a real card would
        # only cut later: so every machine cuts its own.
        for machine in self:
            machine.ip("link", "set", "eth0", "gso_max_segs", "1")
        _ip("-n", self._bridge, "link", "set", f"ve{number}", "mtu", str(size))

    def delay(self, number: int, milliseconds: float) -> None:
        """Delay what the machine sends. Skips the test if the kernel has no netem."""
        inside = ["ip", "netns", "exec", self[number].space]
        netem = ["tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", f"{milliseconds}ms"]
        run = subprocess.run([*inside, *netem], capture_output=True, text=True)
        if run.returncode:
            pytest.skip(f"no delays here: {run.stderr.strip()}")

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.close()
        for space in reversed(self._spaces):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        self._machines, self._spaces = [], []
