"""For all tests: one thread for torch in this process; tiny models only lose by more. Daemons choose their own.

Triton's kernels run in its interpreter, which must be said before anything imports triton.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRITON_INTERPRET"] = "1"
