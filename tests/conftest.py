"""For all tests: one thread for torch in this process; tiny models only lose by more. Daemons choose their own number,
and as other tests need the cores, their threads do not spin while they wait.

Triton's kernels run in its interpreter, which must be said before anything imports triton.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["TRITON_INTERPRET"] = "1"
