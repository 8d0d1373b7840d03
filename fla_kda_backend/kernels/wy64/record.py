"""The workspace of the 64-token kernels: byte offsets and sizes; free of the DSL.

    records      [head][slot]: the raw tile images that prepare_wy64 documents
    flags        [head][slot][half of the value columns]: two int32. The first is 1 once the checkpoint is written, the
                 second, of half 0, once the record is: the overlapped chain does not wait for the whole prepare grid
    checkpoints  [head][slot / 16][half]: a half of a state in accumulator order; replay only

Sixteen chunks of a sequence lie between two checkpoints, and its first checkpoint is that of chunk 16, so the slots of
any two are at least 16 apart and no two share a place.
"""

CHUNK, LOG2_CHUNK = 64, 6
HEAD_DIM = 128
HALF = HEAD_DIM // 2

# -W, Q, K_end, A, U (two halves of the value columns), decay
W_AT, Q_AT, K_END_AT, A_AT, U_AT, DECAY_AT = 0, 16384, 32768, 49152, 54272, 70656
W_BYTES, Q_BYTES, K_END_BYTES, A_BYTES, U_BYTES, DECAY_BYTES = 16384, 16384, 16384, 5120, 8192, 512
RECORD_BYTES = 71168
BANDS = 4  # of 16 tokens
A_BLOCK = 512  # bytes of 16 rows x 16 columns; A holds those on and below the diagonal, column by column
assert A_AT + A_BYTES == U_AT and A_BYTES == BANDS * (BANDS + 1) // 2 * A_BLOCK
assert DECAY_AT + DECAY_BYTES == RECORD_BYTES and U_AT + 2 * U_BYTES == DECAY_AT

FLAG_BYTES = 16  # of a record, both halves
READY_AT = 4  # in them: the record is written
STATE_BYTES = HEAD_DIM * HALF * 4  # half of a state in fp32
LOG2_CHUNKS_PER_CHECKPOINT = 4
CHUNKS_PER_CHECKPOINT = 1 << LOG2_CHUNKS_PER_CHECKPOINT  # chunks between two checkpoints


def a_block(i, j):
    """Place in A of the block in row i and column j of blocks, j <= i."""
    return j * (2 * BANDS + 1 - j) * (A_BLOCK // 2) + (i - j) * A_BLOCK


def slots(tokens, num_seqs, seq_len=None):
    """Slots that a call needs: `tokens` in all in `num_seqs` packed sequences, or sequences of `seq_len` tokens each."""
    if seq_len is None:
        return (tokens >> LOG2_CHUNK) + num_seqs
    return num_seqs * ((seq_len + CHUNK - 1) >> LOG2_CHUNK)


def workspace_bytes(slots, heads, replay=False):
    """Bytes of the workspace of a launch over `slots` slots."""
    checkpoints = 2 * STATE_BYTES * ((slots + CHUNKS_PER_CHECKPOINT - 1) >> LOG2_CHUNKS_PER_CHECKPOINT) if replay else 0
    return heads * (slots * (RECORD_BYTES + FLAG_BYTES) + checkpoints)
