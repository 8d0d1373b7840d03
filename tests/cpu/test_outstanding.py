"""What outstanding.py finds in machine code, on lines as nvdisasm writes them."""

import outstanding
import pytest

NONE = 7


def line(n, text, result=NONE, operands=NONE, waits=()):
    """An instruction with its scoreboards and those that it waits for."""
    control = result << 5 | operands << 8 | sum(1 << each for each in waits) << 11
    return f"        /*{16 * n:04x}*/  {text} ;  /* 0x{n:016x} */\n                  /* 0x{control << 41:016x} */"


def loads_at_arrival(*code):
    """Number of loads under way at the last handover; code: labels, and arguments of `line`."""
    lines = [one if isinstance(one, str) else line(n, *one) for n, one in enumerate(code)]
    return sum(outstanding.handovers("\n".join(lines))[-1]["loads"].values())


def load(board=NONE, operands=NONE, target="R4"):
    return f"LDSM.16.M88.4 {target}, [R2+0x100]", board, operands


def use(*boards):
    return "HMMA.16816.F32.BF16 R8, R4, R10, R8", NONE, NONE, boards


ARRIVE = ("@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x20], RZ",)
EXIT = ("EXIT",)
CASES = {
    "issued, not used": (1, load(0), ARRIVE),
    "used": (0, load(0), use(0), ARRIVE),
    "used behind the arrival": (1, load(0), ARRIVE, use(0)),
    "another scoreboard": (1, load(0), use(1), ARRIVE),
    "only its address was read": (1, load(0, operands=3), use(3), ARRIVE),
    "a later load was used": (0, load(), load(0), use(0), ARRIVE),
    "an earlier load was used": (1, load(0), load(1), use(0), ARRIVE),
    "of several at one scoreboard": (0, load(0), load(0), use(0), ARRIVE),
    "a fence, waited for": (0, load(), ("MEMBAR.ALL.CTA", NONE, 5), ("FENCE.VIEW.ASYNC.S", 2, NONE, (5,)), ARRIVE),
    "a fence, not waited for": (1, load(), ("MEMBAR.ALL.CTA", NONE, 5), ARRIVE),
    "a load of nothing": (0, load(target="RZ"), ARRIVE),
    "one way around the use": (1, load(0), ("@P1 BRA `(.L_x_1)",), use(0), ".L_x_1:", ARRIVE),
    "no way around it": (0, load(0), ("@P1 BRA `(.L_x_1)",), use(0), ("BRA `(.L_x_2)",), ".L_x_1:", use(0), ".L_x_2:", ARRIVE),
    "around a loop": (1, ".L_x_1:", ARRIVE, load(0), ("@P1 BRA `(.L_x_1)",), EXIT),
    "around a loop, used": (0, ".L_x_1:", ARRIVE, load(0), use(0), ("@P1 BRA `(.L_x_1)",), EXIT),
    "behind the end": (0, load(0), use(0), ("BRA `(.L_x_1)",), load(0), ".L_x_1:", ARRIVE),
}


@pytest.mark.parametrize("name", CASES)
def test_loads_under_way(name):
    expected, *code = CASES[name]
    assert loads_at_arrival(*code) == expected


def test_an_arrival_in_the_other_cta_is_at_the_mbarrier_of_the_one_before():
    code = [ARRIVE, ("@P0 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR7], RZ",)]
    found = outstanding.handovers("\n".join(line(n, *one) for n, one in enumerate(code)))
    assert [one["barrier"] for one in found] == [0x20, 0x20]


def test_violations():
    def at(barrier, **loads):
        return {"instruction": "SYNCS.ARRIVE.TRANS64.A1T0", "barrier": barrier, "loads": loads}

    allowed = {0x20: {"LDS": 4}, 0x58: {"LDS": None}, "BAR": {}}
    fine = [at(0x20, LDS=4), at(0x58, LDS=9), at(0x78), {"instruction": "BAR.ARV", "barrier": None, "loads": {}}]
    wrong = [
        at(0x20, LDS=5),
        at(0x20, LDSM=1),
        at(0x78, LDS=1),
        {"instruction": "BAR.ARV", "barrier": None, "loads": {"LDS": 1}},
    ]
    assert outstanding.violations(fine + wrong, allowed) == wrong
