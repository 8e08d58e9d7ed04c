"""On PYTHONPATH, makes every Python process with TEST_HOST in its environment believe that it is on another host than
processes with a different TEST_HOST: they communicate over the network instead of shared memory. Python imports this
module by itself."""

import os

if name := os.environ.get("TEST_HOST"):
    from serve_llm.common import hosts

    hosts.host_id = lambda: f"test host {name}"
