"""The kernel families: what the host must know of each. Free of the DSL: `kernel` names its module, no more."""

from types import ModuleType
from typing import Any, NamedTuple

from .arguments import Addresses
from .column_split import contract as column_split
from .column_split import record as record16
from .wy64 import contract as wy64
from .wy64 import record as record64
from .wy64.backward import contract as wy64_backward
from .wy64.backward import record as record64_backward


class Family(NamedTuple):
    kernel: tuple[str, str]  # module and class; an instance is made of (variant, schedule)
    schedule: Any  # class of the choices that a plan makes
    addresses: Any  # argument tables of a launch
    numbers: Any
    record: ModuleType  # layout of the workspace
    takes_strides: bool  # whether q, k, v, g and beta may be strided


FAMILIES = {
    "column_split": Family(
        kernel=("fla_kda_backend.kernels.column_split.launch", "ColumnSplit"),
        schedule=column_split.Schedule,
        addresses=Addresses,
        numbers=column_split.Numbers,
        record=record16,
        takes_strides=False,
    ),
    "wy64": Family(
        kernel=("fla_kda_backend.kernels.wy64.launch", "WY64"),
        schedule=wy64.Schedule,
        addresses=Addresses,
        numbers=wy64.Numbers,
        record=record64,
        takes_strides=True,
    ),
    "wy64_backward": Family(
        kernel=("fla_kda_backend.kernels.wy64.backward.launch", "WY64Backward"),
        schedule=wy64_backward.Schedule,
        addresses=wy64_backward.Addresses,
        numbers=wy64_backward.Numbers,
        record=record64_backward,
        takes_strides=True,
    ),
}
