"""In which order the local gradients take the chunks where they run beside the chains. Plain arithmetic, free of the DSL.

A sequence of N chunks: the chain of states comes to chunk n after n of its links, the reverse chain after N - n of its own. The
chunk to which both come first is that where the two times meet. From there on it goes outwards, up and down in turn, in the
order of the times at which chunks are ready.

The same function takes the integers of a test and, with the DSL's own min, those of a kernel.
"""

STATES_LINK, REVERSE_LINK = 3, 4  # times of a link, in any unit. On an H200: 0.75 and 1.02 us
BOTH = STATES_LINK + REVERSE_LINK


def chunk_of_turn(turn, chunks, least=min):
    """The chunk of a sequence of so many that is number `turn` in that order."""
    down = (chunks * REVERSE_LINK + BOTH - 1) // BOTH  # chunks below the first one, which goes up
    up = chunks - down
    before, after = least(turn * REVERSE_LINK // BOTH, up), least((turn + 1) * REVERSE_LINK // BOTH, up)
    goes_up = after - before
    return goes_up * (down + before) + (1 - goes_up) * (down - 1 - (turn - before))
