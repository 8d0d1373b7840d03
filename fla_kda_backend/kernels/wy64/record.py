"""The workspace of the 64-token kernels: byte offsets and sizes; free of the DSL.

    records      [head][slot]: what prepare leaves of a chunk, see below
    flags        [head][slot][value half]: two int32. The first is 1 once the checkpoint is written. The second, of value half
                 0, is 1 once the record is written: the overlapped chain does not wait for the whole prepare grid
    checkpoints  [head][slot / 16][value half]: half of a state in accumulator order; replay only

Sixteen chunks of a sequence lie between two checkpoints, and its first checkpoint is that of chunk 16. So the slots of any two
checkpoints are at least 16 apart, and no two share memory.

A record holds raw images of what the chain wants in shared memory and in registers; the formulas stand in prepare/kernel.py:

    -W, Q, K_end   bf16, 64 rows of 128 channels, as two tiles [64 rows][64 channels] with 128-byte swizzle: 16-byte piece p
                   of row r lies at piece p ^ (r & 7)
    A              bf16, per 16 columns j the rows i from the diagonal block down, 32 bytes each with 32-byte swizzle: piece p
                   of row i lies at piece p ^ (i >> 2 & 1)
    U              per value half: accumulators of U^T [64 channels x 64 tokens], [16-token block][128 threads][8 bf16]
    d              fp32 [128], channel 16a + 8b + 2c + e at 16a + 4c + 2b + e
"""

CHUNK, LOG2_CHUNK = 64, 6  # tokens
HEAD_DIM = 128  # of keys and of values
HALF = HEAD_DIM // 2

# byte offsets and sizes in a record; U twice, once per value half
W_AT, Q_AT, K_END_AT, A_AT, U_AT, DECAY_AT = 0, 16384, 32768, 49152, 54272, 70656
W_BYTES, Q_BYTES, K_END_BYTES, A_BYTES, U_BYTES, DECAY_BYTES = 16384, 16384, 16384, 5120, 8192, 512
RECORD_BYTES = 71168
BANDS = 4  # of 16 tokens
A_BLOCK = 512  # bytes of 16 rows x 16 columns; A holds the blocks on and below the diagonal, column by column
assert A_AT + A_BYTES == U_AT and A_BYTES == BANDS * (BANDS + 1) // 2 * A_BLOCK
assert DECAY_AT + DECAY_BYTES == RECORD_BYTES and U_AT + 2 * U_BYTES == DECAY_AT

FLAG_BYTES = 16  # per record, both value halves
READY_AT = 4  # offset, in a record's flags, of the one that says that the record is written
STATE_BYTES = HEAD_DIM * HALF * 4  # half of a state in fp32
LOG2_CHUNKS_PER_CHECKPOINT = 4
CHUNKS_PER_CHECKPOINT = 1 << LOG2_CHUNKS_PER_CHECKPOINT


def a_block(i, j):
    """Offset in A of the block in row i and column j of blocks, j <= i."""
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
