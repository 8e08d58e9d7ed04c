"""Many simultaneous streams from a client on a machine in a network namespace, and a check for leftover processes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from support.namespaces import Machine
from support.nodes import LIMIT, body

# Streams all requests at the same time, reports when all have begun, and prints their texts.
STREAM_ALL = """
import json, sys, threading, urllib.request
url, bodies = sys.argv[1], json.loads(sys.argv[2])
texts = [""] * len(bodies)
begun = [threading.Event() for _ in bodies]

def stream(index):
    body = json.dumps(bodies[index] | {"stream": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    begun[index].set()
                    event = json.loads(line[6:])
                    texts[index] += event["choices"][0]["text"] if "choices" in event else str(event)
    finally:
        begun[index].set()

threads = [threading.Thread(target=stream, args=(index,)) for index in range(len(bodies))]
for thread in threads:
    thread.start()
for one in begun:
    one.wait()
print("begun", flush=True)
for thread in threads:
    thread.join()
print(json.dumps(texts))
"""

# Waits until no serve-llm process is left, and prints those that are still there after a while.
LEFT = """
import os, psutil, time

def find():
    listed = psutil.process_iter(["pid", "cmdline"])  # skips processes that end meanwhile
    commands = {process.pid: " ".join(process.info["cmdline"] or []) for process in listed}
    return [command for pid, command in commands.items() if pid != os.getpid() and "serve_llm" in command]

deadline = time.monotonic() + 30
while (left := find()) and time.monotonic() < deadline:
    time.sleep(0.05)
print(left)
"""


def crowd(count: int = 8, max_tokens: int = 900) -> list[dict[str, Any]]:
    """Return greedy and seeded requests with different prompts."""
    return [
        json.loads(body(prompt=f"def f{number}(", max_tokens=max_tokens, temperature=number % 2, seed=number))
        for number in range(count)
    ]


def start_streams(machine: Machine, url: str, bodies: list[dict[str, Any]]) -> subprocess.Popen[str]:
    """Start streams. Returns once all have begun."""
    client = machine.popen(sys.executable, "-c", STREAM_ALL, url, json.dumps(bodies), stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.readline() == "begun\n"
    return client


def stream_here(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    """Return the texts of requests to a daemon on this machine."""
    command = [sys.executable, "-c", STREAM_ALL, url, json.dumps(bodies)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    texts: list[str] = json.loads(run.stdout.splitlines()[-1])
    return texts


def texts_of(client: subprocess.Popen[str]) -> list[str]:
    texts: list[str] = json.loads(client.communicate(timeout=LIMIT)[0])
    return texts


def list_leftovers(machine: Machine) -> str:
    """Return the serve-llm processes on a machine, as a list; "[]" if there are none."""
    return machine.run(sys.executable, "-c", LEFT).stdout.strip()
