"""Where the chain kernel runs beside prepare: how many chains run at once, and in which order prepare works for them.

Chain number sequence * heads + head is the chain of one (sequence, head). It is two tasks, one per value half. Every running
task occupies one SM that prepare then lacks. Beyond about 32 of 132 SMs this costs more than it gains, so chains run in groups
of that size. Prepare goes through the chunks of a group in order of time and then to the next group, so that a record is read
from the L2 soon after it was written.

Plain arithmetic, free of the DSL: the same functions take the integers of a plan and of a test, and, with the DSL's own max and
min, those of a launch and of a kernel.
"""

# Tasks that run at once, and the SMs that this is meant for. Prepare takes 5.0 us of an SM per (chunk, head), the links of the
# two value halves 1.4 to 1.9 us.
# On an H200, in us: 56 tasks 233 at once, 245 in two groups; 64 tasks 277 and 236; 80 tasks 303 in two, 370 in three; 96 tasks
# 398 in two, 351 in three; 192 tasks 806 in five, 758 in six.
TASKS, SMS = 32, 132


def chains_per_group(chains, sms, most=max):
    """Chains that run at once on so many SMs; all of them where their tasks are not many more than TASKS * sms / SMS."""
    share = max(TASKS * sms // SMS, 2)
    groups = most((2 * chains + (max(share // 4, 1) - 1)) // share, 1)
    return (chains + groups - 1) // groups


def locate_task(task, chains, per_group, chunks, least=min):
    """(chain, chunk) of prepare's (chain, chunk) pair number `task`, below chains * chunks."""
    size = per_group * chunks
    group = task // size
    first, rest = group * per_group, task - group * size
    together = least(per_group, chains - first)
    chunk = rest // together
    return first + (rest - chunk * together), chunk
