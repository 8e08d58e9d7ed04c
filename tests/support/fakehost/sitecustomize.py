"""On PYTHONPATH: makes every Python process with TEST_HOST in its environment believe that it runs on another host than
those with another TEST_HOST. They then use no shared memory between them, but the network. Python imports it by itself.
"""

import os

if name := os.environ.get("TEST_HOST"):
    from serve_llm.common import hosts

    hosts.host_id = lambda: f"test host {name}"
