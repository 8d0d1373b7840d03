"""Addresses of local records in the workspace of a launch, on the device; see record.py for what lies there."""

from cutlass import Int64

from fla_kda_backend.kernels.wy64.backward.record import LOCAL_BYTES
from fla_kda_backend.kernels.wy64.record import FLAG_BYTES, RECORD_BYTES


def local_record(workspace, heads, slots, head, slot):
    """Address of the local record of (head, slot); `slots` and `slot` are counted from the launch's first slot."""
    records = Int64(heads) * slots
    return workspace + records * (RECORD_BYTES + FLAG_BYTES) + (Int64(head) * slots + slot) * LOCAL_BYTES
