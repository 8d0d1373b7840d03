"""Which chains run at once where the chain kernel runs beside prepare, and in which order prepare works for them.

A chain is that of one (sequence, head), number sequence * heads + head: two tasks, one a half of the value columns. Each
task at once takes an SM from prepare. More than a share of the SMs would lose more there than they gain, so the chain's
CTAs take group after group of chains, all of a group at once; prepare goes through the chunks of a group in order of time
and then to the next one. A record is read soon after it was written, from the L2.

Plain arithmetic, free of the DSL: for the integers of a launch, of a kernel (with the DSL's own max and min) and of a plan.
"""

SMS = 132
TASKS = 32  # at once, of so many SMs: prepare takes 5.0 us of an SM for a chunk and head, the two halves' links 1.4 to 1.9.
# On an H200, in us: 56 tasks 233 at once, 245 in two groups; 64 tasks 277 and 236; 80 tasks 303 in two, 370 in three; 96 tasks
# 398 in two, 351 in three; 192 tasks 806 in five, 758 in six.


def chains_at_once(chains, sms, most=max):
    """Chains of a group; all of them where their tasks are not many more than TASKS * sms / SMS."""
    share = max(TASKS * sms // SMS, 2)
    groups = most((2 * chains + (max(share // 4, 1) - 1)) // share, 1)
    return (chains + groups - 1) // groups


def place(task, chains, at_once, chunks, least=min):
    """(chain, chunk) of number `task`, below chains * chunks, of the (chain, chunk) pairs in prepare's order."""
    size = at_once * chunks
    group = task // size
    first, rest = group * at_once, task - group * size
    together = least(at_once, chains - first)
    chunk = rest // together
    return first + (rest - chunk * together), chunk
