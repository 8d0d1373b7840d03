"""Which loads of shared memory may still be under way where a thread lets others write there; read from machine code.

A load takes its time: it waits for the memory pipe, behind stores to global memory perhaps for long. The control words of the
machine code say what has certainly been waited for. An instruction with a result later on counts up one of six scoreboards when
it is issued, and down when the result is there; every instruction names the scoreboards that must be 0 before it is issued.
ptxas puts an arrival at an mbarrier behind the loads that stand before it, but has it wait for none of them, and on an H200
the arrival overtakes loads (docs/lab/once_other_bits.md). So what is freed must have been loaded by then: something must have
waited.

`handovers` finds the instructions that may let others write, and the loads that nothing has waited for on some way there. Which
of them read what is freed, machine code does not say. `check` has a table of what may be under way, with the reasons.
"""

import re
from collections import Counter, deque

SCOREBOARDS = 6
# arrivals at mbarriers, barriers of threads, copies into shared memory
HANDOVER = re.compile(r"SYNCS\.ARRIVE|BAR\.(?:SYNC|ARV|RED)|UBLKCP\.S\.G|UBLKCP\.MULTICAST|UTMALDG")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([^;]+?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND_WORD = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"(\.L_x_\d+):")


class Instruction:
    def __init__(self, text, predicated, second_word):
        self.text, self.predicated = text, predicated
        self.opcode = text.split()[0]
        control = second_word >> 41  # stall 4 bits, yield 1, scoreboard of the result 3, of the operands 3 (7: none), waits 6
        result, operands = control >> 5 & 7, control >> 8 & 7
        # That of a load's operands says that its address has been read. A fence, which has no result, is done then.
        self.scoreboards = {each for each in ((result, operands) if self.fences else (result,)) if each < SCOREBOARDS}
        self.waits = {n for n in range(SCOREBOARDS) if control >> 11 >> n & 1}

    @property
    def loads_shared(self):
        """ptxas also puts loads of nothing before some fences."""
        return self.opcode.split(".")[0] in ("LDS", "LDSM") and not self.text.split()[1].startswith("RZ")

    @property
    def fences(self):
        """Waits, by its scoreboard, for all earlier accesses; the fence of a proxy begins with it."""
        return self.opcode.startswith("MEMBAR")


def instructions(section):
    """(instructions, label -> number of the one behind it) of a function, from `nvdisasm -c -hex`."""
    found, labels, first = [], {}, None
    for line in section.split("\n"):
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif one := _INSTRUCTION.match(line):
            first = one[2], "@" in line.split("*/")[1]
        elif first and (word := _SECOND_WORD.match(line)):
            found.append(Instruction(*first, int(word[1], 16)))
            first = None
    return found, labels


def successors(code, labels):
    for n, one in enumerate(code):
        kind, operands = one.opcode.split(".")[0], one.text.split()[1:]
        targets = re.findall(r"\.L_x_\d+", one.text) if kind in ("BRA", "BRX", "CALL", "WARPSYNC") else []
        found = {labels[each] for each in targets}
        # a branch without a predicate before it, or among its operands, always goes
        goes = kind in ("EXIT", "RET", "BRX") or (kind == "BRA" and len(operands) == 1 and "DIV" not in one.opcode)
        if one.predicated or not goes:
            found.add(n + 1)
        yield {each for each in found if each < len(code)}


def under_way(code, labels):
    """Per instruction, the loads that may be under way when it is issued: {(number of the load, scoreboards)}.

    The load is done once one of these scoreboards has been waited for: its own, those of later loads, because loads of shared
    memory are executed in order (ptxas itself relies on it: of several it gives a scoreboard to the last alone), and that of a
    later fence.
    """
    following = list(successors(code, labels))
    before = [None] * len(code)
    before[0], to_do = frozenset(), deque([0])
    issued = {}
    while to_do:
        n = to_do.popleft()
        one = code[n]
        now = {(load, boards) for load, boards in before[n] if not boards & one.waits}
        issued[n] = now
        if one.loads_shared or one.fences:
            now = {(load, boards | one.scoreboards) for load, boards in now}
        if one.loads_shared:
            now = now | {(n, frozenset(one.scoreboards))}
        for each in following[n]:
            joined = frozenset(now) if before[each] is None else before[each] | now
            if joined != before[each]:
                before[each] = joined
                to_do.append(each)
    return issued


def handovers(section):
    """[{instruction, barrier, loads}] of a function: `barrier` is the mbarrier's byte offset where the instruction has it,
    `loads` counts the loads under way by opcode."""
    code, labels = instructions(section)
    found, barrier = [], None
    for n, there in sorted(under_way(code, labels).items()):
        if HANDOVER.match(code[n].opcode):
            offset = re.search(r"\+(0x[0-9a-f]+)\]", code[n].text)
            if ".RED." not in code[n].opcode:  # an arrival in the other CTA, at the same mbarrier as the one before it
                barrier = int(offset[1], 16) if offset else None
            loads = Counter(code[load].opcode for load in {load for load, _ in there})
            found.append({"instruction": code[n].opcode, "barrier": barrier, "loads": loads})
    return found


# ---- what may be under way ---------------------------------------------------------------------------------------------

U, INFO, ROWS = "LDS.128", "LDS", "LDSM.16.M88.4"


def recurrence_split():
    """Its only arrivals free the stage of the chunk before. Of that chunk everything has been used; of the one at hand the rows
    of k_start and q_start may be under way, and nothing that is loaded behind them: k_end, scores, inverse, v, beta."""
    return {"A1T0": {ROWS: None}}


def chain(chain_stages, output_stages):
    """Byte offsets of the mbarriers as Shared.allocate makes them: `full` and `empty` of {W, U, decay}, of {Q, K_end, A}, of O,
    of checkpoints. U and the decay of the link to come may be under way, 4 loads and 8, while other places are freed. An
    initial state lies in a place of {Q, K_end, A}: none of its loads may be under way then, and none is an LDS.128."""
    chain_empty = 8 * chain_stages
    output_empty = 16 * chain_stages + 8 * output_stages
    o_full = output_empty + 8 * output_stages
    return {
        chain_empty: {U: 4},  # no more than U of the link to come, whose decay is loaded later
        output_empty: {U: None},
        o_full: {U: None},  # filled, not freed
        o_full + 8: {},  # O, which the writers have read
        o_full + 16: {U: None},  # a checkpoint, filled
        o_full + 24: {},
        "SYNCS": {INFO: None},  # loaders say how much comes: what they know of tasks
        "BAR": {U: None},  # at the end: of links that do not come
    }


def chain_of_states():
    """As `chain`; but {K_end}, whose stages hold the images, is read by products alone, so U and decays may be under way."""
    from fla_kda_backend.kernels.wy64.chain.shared import CHAIN_STAGES

    return {8 * CHAIN_STAGES: {U: 4}, "A1T0": {U: None}, "SYNCS": {INFO: None}, "BAR": {U: None, INFO: None}}


def reverse_chain():
    """While stages of a link are freed the decay of the link to come may be under way, 8 loads, and none of the rows of dO."""
    return {"A1T0": {U: 8}, "SYNCS": {INFO: None}, "BAR": {U: None, INFO: None}}  # BAR: at the end, and while tasks are sorted


def prepare():
    """Its barriers let others write anywhere. Warp 0 copies while it still loads what it knows of the chunk."""
    return {"SYNCS": {INFO: None}, "UTMALDG": {INFO: None}}


def violations(handovers, allowed):
    """Those handovers at which more is under way than `allowed` has: {barrier or part of the opcode: {load: most of them}}."""

    def rule(one):
        freeing = "A1T0" in one["instruction"]
        if freeing and one["barrier"] in allowed:
            return allowed[one["barrier"]]
        return allowed.get("A1T0" if freeing else one["instruction"].split(".")[0], {})

    def excess(one):
        most = rule(one)
        return {load: n for load, n in one["loads"].items() if load not in most or (most[load] is not None and n > most[load])}

    return [one for one in handovers if excess(one)]
