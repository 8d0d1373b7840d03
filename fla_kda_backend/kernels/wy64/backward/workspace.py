"""Addresses in the workspace of a launch, on the device; see record.py for what lies there.

`slots` and `slot` are counted from the launch's first slot.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.record import LOCAL_BYTES, NEXT_AT, READY_AT
from fla_kda_backend.kernels.wy64.record import FLAG_BYTES, RECORD_BYTES
from fla_kda_backend.kernels.wy64.workspace import flag_address

PUBLISH_EVERY = 2  # links: a fence for the whole GPU takes the thread that stores about as long as a link takes


def record(workspace, heads, slots, head, slot):
    """Address of the record of (head, slot)."""
    return workspace + (Int64(head) * slots + slot) * RECORD_BYTES


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


@cute.jit
def publish(ready, step, begin, end):
    """Count parts of local records, at the addresses ready + begin * step to ready + (end - 1) * step. This thread has seen
    their bulk stores complete.

    Who reads a count with acquire semantics sees what all those have written that added to it.
    """
    ptx.fence_proxy_async_global()
    ptx.fence_gpu()
    for link in cutlass.range(begin, end, unroll=1):
        ptx.red_add_b32(ready + Int64(link) * step, Int32(1))


@cute.jit
def publish_at(link, ready, step, wait: cutlass.Constexpr):
    """After each link of an item has closed its groups of bulk stores: `publish`, now and then, up to the last link but two.

    wait: waits for the stores of all but the last two links.
    """
    if link % PUBLISH_EVERY == PUBLISH_EVERY - 1:
        wait()
        publish(ready, step, cutlass.max(link - 1 - PUBLISH_EVERY, Int32(0)), link - 1)


@cute.jit
def publish_rest(links, ready, step):
    """`publish`, after all links of an item, those that publish_at has left out."""
    ptx.bulk_wait()
    publish(ready, step, cutlass.max(links // PUBLISH_EVERY * PUBLISH_EVERY - 2, Int32(0)), links)
