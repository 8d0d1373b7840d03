"""The workspace of the 64-token kernels: slots and checkpoints of packed sequences never meet."""

from hypothesis import given
from hypothesis import strategies as st

from fla_kda_backend.kernels.wy64 import record as record64


def chunk_slots(lengths):
    """Slots of every sequence's chunks, by the rule of sequences.py."""
    begin, slots = 0, []
    for s, length in enumerate(lengths):
        base = (begin >> record64.LOG2_CHUNK) + s
        slots.append(range(base, base - (-length // record64.CHUNK)))
        begin += length
    return slots, begin


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_packed_chunks_and_checkpoints_have_places_of_their_own(lengths):
    slots, tokens = chunk_slots(lengths)
    count = record64.slots(tokens, len(lengths))
    used = [slot for chunks in slots for slot in chunks]
    assert len(set(used)) == len(used) and all(slot < count for slot in used)
    every = record64.CHUNKS_PER_CHECKPOINT
    places = [slot >> record64.LOG2_CHUNKS_PER_CHECKPOINT for chunks in slots for slot in chunks[every::every]]
    assert len(set(places)) == len(places)
    one = record64.workspace_bytes(count, 1, replay=True) - record64.workspace_bytes(count, 1)
    assert all(place < one // (2 * record64.STATE_BYTES) for place in places)


def test_equal_lengths_leave_no_slot_empty():
    assert record64.slots(3 * 130, 3, 130) == 3 * 3
    assert record64.slots(0, 3, 0) == 0


def test_every_part_of_the_workspace_is_aligned_for_bulk_copies():
    places = [getattr(record64, f"{name}_AT") for name in ("W", "Q", "K_END", "A", "U", "DECAY")]
    assert all(place % 128 == 0 for place in (*places, record64.RECORD_BYTES, record64.U_BYTES, record64.STATE_BYTES))
    assert record64.workspace_bytes(7, 3) % 16 == 0


def test_the_blocks_of_a_fill_it_column_by_column():
    blocks = [(i, j) for j in range(record64.BANDS) for i in range(j, record64.BANDS)]
    places = [record64.a_block(i, j) for i, j in blocks]
    assert places == list(range(0, record64.A_BYTES, record64.A_BLOCK))
