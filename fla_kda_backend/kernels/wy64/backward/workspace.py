"""Addresses in the workspace of a launch, on the device; see record.py for what lies there.

`slots` and `slot` are counted from the launch's first slot.
"""

from cutlass import Int32, Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.record import LOCAL_BYTES, NEXT_AT, READY_AT
from fla_kda_backend.kernels.wy64.record import FLAG_BYTES, RECORD_BYTES
from fla_kda_backend.kernels.wy64.workspace import flag_address


def local_record(workspace, heads, slots, head, slot):
    """Address of the local record of (head, slot)."""
    records = Int64(heads) * slots
    return workspace + records * (RECORD_BYTES + FLAG_BYTES) + (Int64(head) * slots + slot) * LOCAL_BYTES


def ready_address(workspace, heads, slots, head, slot):
    """Address of the number of CTAs that have written their part of the local record of (head, slot)."""
    return flag_address(workspace, heads, slots, head, slot) + READY_AT


def next_address(workspace, heads, slots):
    """Address of the number of the next (chunk, head) pair to be taken."""
    return flag_address(workspace, heads, slots, 0, 0) + NEXT_AT


def publish(ready):
    """Count, at address `ready`, the part of a local record whose bulk stores this thread has seen complete."""
    ptx.fence_proxy_async_global()
    ptx.red_release_add_b32(ready, Int32(1))
