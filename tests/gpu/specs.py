"""Every compiled variant that the GPU tests launch on an H200, listed so that another machine can build them.

    python tests/gpu/specs.py FOLDER [PART PARTS]

compiles them all, or part PART of PARTS (from 0), into FOLDER; needs the CuTe DSL and a C compiler, no GPU. On the GPU
machine FLA_KDA_CUTE_CACHE_DIR=FOLDER finds them. Tests take their parameters from the tables here.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the tables lie, for who runs this file

import call_table
import covering
from gpu import models

from fla_kda_backend import planning
from fla_kda_backend.compiling import KernelSpec, builder

SM_COUNT = 132  # of an H200 and an H100 SXM: what planning chooses there is listed
BVS = planning.BV_CHOICES
COLUMN_SPLIT = ("exact", "robust")
SETTINGS = (*COLUMN_SPLIT, "wy64", "wy64 replay")  # of a test: the column split's arithmetic, or the 64-token kernels
WITHOUT_REPLAY = SETTINGS[:3]
OVERLAP = ("wy64 overlap", "wy64 overlap replay")  # for sequences of equal length, or one packed one
DIRECT = "wy64 direct"  # for calls without an initial state
VARIANTS = (*((setting, bv) for setting in COLUMN_SPLIT for bv in BVS), ("wy64", None), ("wy64 replay", None))


class Kinds(NamedTuple):
    """Dtypes that a variant is compiled for."""

    initial: str | None
    final: str | None
    cu_dtype: str | None


STANDARD = Kinds("fp32", "fp32", None)
PACKED = Kinds("fp32", "fp32", "int64")
PACKED32 = Kinds("fp32", "fp32", "int32")
NO_INITIAL = Kinds(None, "fp32", None)

# those of the golden cases, which run with every number of columns
GOLDEN = (
    STANDARD,
    PACKED,
    NO_INITIAL,
    Kinds(None, None, None),
    Kinds("bf16", "bf16", None),
    Kinds("fp32", None, None),
    Kinds(None, "fp32", "int64"),
)
# packed sequences with tails, at 32 columns
EXACT_PACKED = (
    PACKED,
    PACKED32,
    Kinds(None, "fp32", "int64"),
    Kinds(None, "bf16", "int32"),
    Kinds(None, None, "int64"),
    Kinds("bf16", "bf16", "int64"),
    Kinds("bf16", "fp32", "int64"),
    Kinds("fp32", "bf16", "int64"),
    Kinds("fp32", None, "int64"),
)
ROBUST_PACKED = (PACKED, PACKED32, Kinds(None, "fp32", "int64"), Kinds("fp32", None, "int64"))
# in segments of the time axis: setting, columns, kinds
SEGMENTED = (
    ("exact", 32, STANDARD),
    ("exact", 32, PACKED),
    ("exact", 32, Kinds("bf16", "bf16", "int64")),
    ("exact", 64, PACKED),
    ("exact", 128, PACKED),
    ("exact", 128, NO_INITIAL),
    ("robust", 32, STANDARD),
    ("robust", 32, PACKED),
    ("robust", 64, PACKED),
    ("robust", 128, PACKED),
)
# the 64-token kernels: whole, with replay, and in segments, which exclude replay
WY64_PACKED = (*ROBUST_PACKED, Kinds(None, None, "int64"), Kinds("bf16", "bf16", "int64"), Kinds(None, "bf16", "int32"))
WY64 = (STANDARD, NO_INITIAL, Kinds("fp32", None, None), Kinds(None, None, None), *WY64_PACKED)
WY64_REPLAY = (STANDARD, PACKED, PACKED32, NO_INITIAL, Kinds("fp32", None, None), Kinds("bf16", "bf16", "int64"))
WY64_OVERLAP = (STANDARD, NO_INITIAL, Kinds("fp32", None, None), PACKED, NO_INITIAL._replace(cu_dtype="int64"))
WY64_DIRECT = tuple(Kinds(None, *kinds) for kinds in (
    ("fp32", None), ("fp32", "int64"), ("fp32", "int32"), (None, "int64"), ("bf16", "int64"), (None, None)))  # fmt: skip
WY64_SEGMENTED = (STANDARD, PACKED, NO_INITIAL, Kinds("bf16", "bf16", "int64"))

# every kind of call: on the 64-token kernels, and, as on GPUs without them, on the column split; with intermediate states
ROBUST_KINDS = [
    call_table.Kind(**row) for row in covering.rows(call_table.ARITHMETIC | call_table.STORAGE, 2, call_table.allowed)
]
BY_NAME = (*call_table.BY_GATE.values(), call_table.KIMI)
STATES = tuple(
    kind._replace(states=True)
    for kind in (call_table.FLASHKDA, call_table.SOFTPLUS._replace(cu_dtype="int32"), call_table.KIMI)
)
REPLAYED = (call_table.SOFTPLUS, call_table.KIMI)
KEYS_FIRST = call_table.FLASHKDA._replace(state_v_first=False, initial=None, cu_dtype="int64")  # of sequences of one chunk


def options_of(setting, bv):
    """Family of a setting, and those of its options that a plan decides; bv counts for the column split alone."""
    if setting in COLUMN_SPLIT:
        return "column_split", {"arithmetic": setting, "bv": bv, "warps": planning.warps(setting, bv)}
    words = setting.split()
    direct = {"direct": True} if "direct" in words else {}
    return "wy64", {"max_ctas": SM_COUNT, "overlap": "overlap" in words, "replay": "replay" in words, **direct}


def variant(setting, bv, kinds, segmented=False):
    family, options = options_of(setting, bv)
    return KernelSpec.of(family, "sm_90a", **options, segmented=segmented, **kinds._asdict())


def variant_of(kind, setting="wy64", **options):
    """The spec of a kind of call_table, in a setting and with more options of the plan."""
    family, own = options_of(setting, 32)
    fields = kind._asdict()
    storage = {name: fields.pop(name) for name in Kinds._fields}
    other = {name: value for name, value in fields.items() if value != planning.FLASHKDA[name]}
    return KernelSpec.of(family, "sm_90a", **own, **storage, segmented=False, **other, **options)


def is_direct(case):
    """Whether planning has prepare compute sequences of one chunk."""
    lengths, kind = case.lengths, case.kind
    fresh, standard = kind.initial is None, (kind.gate, kind.gate_dtype, kind.l2norm, kind.states)
    return fresh and standard == ("bounded", "bf16", True, False) and sum(lengths) <= 64 * len(lengths)


def specs_of_calls():
    """Those that test_calls.py launches."""
    stateless = (kind._replace(states=False) for kind in STATES)
    found = [variant_of(kind) for kind in (*call_table.KINDS, *BY_NAME, *STATES, *stateless)]
    found += [variant_of(case.kind, DIRECT) for case in call_table.CASES if is_direct(case)]
    found += [variant_of(KEYS_FIRST, setting) for setting in ("wy64", DIRECT)]
    found += [variant_of(kind, setting) for kind in REPLAYED for setting in ("wy64 replay", *OVERLAP)
              if kind.cu_dtype is None or setting == "wy64 replay"]  # fmt: skip
    found += [variant_of(kind, setting) for setting, kind in models.VARIANTS]
    found += [variant_of(kind, "robust") for kind in (*ROBUST_KINDS, *STATES)]
    return found + [variant_of(kind, "robust", state_chunk=32) for kind in STATES]


def needed_specs():
    rows = [("exact", bv, kinds) for bv in BVS for kinds in GOLDEN]
    rows += [("robust", bv, kinds) for bv in BVS for kinds in (STANDARD, PACKED)]
    rows += [("exact", 32, kinds) for kinds in EXACT_PACKED]
    rows += [("robust", 32, kinds) for kinds in (*ROBUST_PACKED, NO_INITIAL, Kinds("fp32", None, None))]
    rows += [("wy64", None, kinds) for kinds in WY64] + [("wy64 replay", None, kinds) for kinds in WY64_REPLAY]
    rows += [(setting, None, kinds) for setting in OVERLAP for kinds in WY64_OVERLAP]
    rows += [(DIRECT, None, kinds) for kinds in WY64_DIRECT] + [("wy64", None, kinds) for kinds in WY64_DIRECT]
    in_segments = (*SEGMENTED, *(("wy64", None, kinds) for kinds in WY64_SEGMENTED))
    specs = [variant(*row) for row in rows] + [variant(*row, segmented=True) for row in in_segments]
    return list(dict.fromkeys([*specs, *specs_of_calls()]))


def main(folder, part="0", parts="1"):
    for spec in needed_specs()[int(part) :: int(parts)]:
        print(builder.export(spec, folder), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
