"""Addresses in the workspace of a launch, on the device; see record.py for what lies there."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.record import (
    CHUNKS_PER_CHECKPOINT,
    FLAG_BYTES,
    LOG2_CHUNKS_PER_CHECKPOINT,
    READY_AT,
    RECORD_BYTES,
    STATE_BYTES,
)


def flag_address(workspace, heads, slots, head, slot):
    """Address of the flags of a record; `slots` and `slot` are counted from the launch's first slot."""
    return workspace + Int64(heads) * slots * RECORD_BYTES + (Int64(head) * slots + slot) * FLAG_BYTES


@cute.jit
def clear_flags(workspace, heads, slots, head, slot):
    """Clear the flags of a record, by one thread of the CTA that writes the record.

    The chain waits for all these CTAs before it reads a flag. So it finds zeros whatever the workspace held before.
    """
    ptx.stg_words(flag_address(workspace, heads, slots, head, slot), [Int32(0)] * 4)


class Workspace:
    """The workspace of a launch over the call's slots [slot_begin, slot_end); slots below are those of the call."""

    def __init__(self, address, heads, slot_begin, slot_end):
        self.address, self.heads, self.slot_begin, self.slot_end = address, heads, slot_begin, slot_end

    def record(self, head, slot):
        """Address of the record of (head, slot)."""
        number = Int64(head) * (self.slot_end - self.slot_begin) + (slot - self.slot_begin)
        return self.address + number * RECORD_BYTES

    def checkpoint_flag(self, head, slot, value_half):
        """Address of the flag that says that the checkpoint of a slot is written."""
        slots = self.slot_end - self.slot_begin
        return flag_address(self.address, self.heads, slots, head, slot - self.slot_begin) + 8 * value_half

    def record_flag(self, head, slot):
        """Address of the flag that says that the record of (head, slot) is written."""
        return self.checkpoint_flag(head, slot, 0) + READY_AT

    def checkpoint(self, head, slot, value_half):
        """Address of the state before the chunk in a slot."""
        slots = self.slot_end - self.slot_begin
        per_head = (slots + (CHUNKS_PER_CHECKPOINT - 1)) >> LOG2_CHUNKS_PER_CHECKPOINT
        number = (Int64(head) * per_head + (slot >> LOG2_CHUNKS_PER_CHECKPOINT)) * 2 + value_half
        return flag_address(self.address, self.heads, slots, self.heads, 0) + number * STATE_BYTES
