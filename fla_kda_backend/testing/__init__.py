"""Calls of chunk_kda to try things with: for tests, benchmarks, the command line and the check of untested GPUs.

Importing this package imports no torch, and a call on the meta device needs no GPU.
"""

from .calls import DIM, TOKEN_AXIS, Form, laid_out, make
from .gates import LOWER_BOUND
from .values import REGIMES, Normal, regime, standard_normal

__all__ = ["DIM", "LOWER_BOUND", "REGIMES", "TOKEN_AXIS", "Form", "Normal", "laid_out", "make", "regime", "standard_normal"]
