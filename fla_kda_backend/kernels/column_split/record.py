"""The workspace of the 16-token kernels: one record of raw tile images per (head, slot); byte offsets inside it."""

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


def slots(tokens, num_seqs, seq_len=None):
    """Slots that a call needs: `tokens` in all in `num_seqs` packed sequences, or sequences of `seq_len` tokens each."""
    if seq_len is None:
        return (tokens >> LOG2_CHUNK) + num_seqs
    return num_seqs * ((seq_len + CHUNK - 1) >> LOG2_CHUNK)


def workspace_bytes(slots, heads, replay=False):
    """Bytes of the workspace of a launch over `slots` slots; replay is the 64-token kernels' and adds nothing here."""
    return slots * heads * RECORD_BYTES
