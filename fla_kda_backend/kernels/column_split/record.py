"""The workspace of the 16-token kernels: one record per (head, slot). Free of the DSL.

Byte offsets inside a record, and what lies there:

    k_start, q_start, k_end  16 rows of 256 bytes; 16-byte piece p of row r lies at piece p ^ (r & 7)
    scores, inverse          m16n8k16 A fragments [16, 16] bf16: 32 lanes of 16 bytes, see `fragment_at`. "robust": inverse - I
                             in two terms, bf16 and what that leaves; the second one transposed, above the diagonal
    decay                    [128] fp32, in the order in which the recurrence reads it, see `decay_at`
    beta                     [16] words of 32 bits: fp32, or "exact": the bf16 twice; 0 past the sequence's end
"""

CHUNK, LOG2_CHUNK = 16, 4
ROW_BYTES = 256  # 128 bf16 channels
K_START = 0
Q_START = 4096
K_END = 8192
SCORES = 12288
INVERSE = 12800
DECAY = 13312
BETA = 13824
RECORD_BYTES = 13888


def fragment_at(i, j):
    """Byte offset of element (i, j) in a [16, 16] A fragment. It is a sum over i and j: at (i, 0) plus at (0, j)."""
    return (i % 8) * 64 + (i // 8) * 4 + (j // 2 % 4) * 16 + (j // 8) * 8 + (j % 2) * 2


def decay_at(pair):
    """Byte offset of the decay of channel 2 * pair in the record; channel 2 * pair + 1 follows DECAY_PAIR bytes further on.

    Channel k is word (k % 8) * 16 + (k // 16) * 2 + (k // 8) % 2.
    """
    return DECAY + ((2 * pair) % 8) * 64 + (pair // 8) * 8 + ((pair // 4) % 2) * 4


DECAY_PAIR = 64


def slots(tokens, num_seqs, seq_len=None):
    """Slots that a call needs: `tokens` in all in `num_seqs` packed sequences, or sequences of `seq_len` tokens each."""
    if seq_len is None:
        return (tokens >> LOG2_CHUNK) + num_seqs
    return num_seqs * ((seq_len + CHUNK - 1) >> LOG2_CHUNK)


def workspace_bytes(slots, heads, replay=False):
    """Bytes of the workspace of a launch over `slots` slots; replay is the 64-token kernels' and adds nothing here."""
    return slots * heads * RECORD_BYTES
