"""For all tests: one thread for torch in this process; tiny models only lose by more. Daemons choose their own."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
