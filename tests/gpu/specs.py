"""Every compiled kernel that the GPU tests launch on an H200, listed so that another machine can build them.

    python tests/gpu/specs.py FOLDER [PART PARTS [training]]

compiles them all, or part PART of PARTS (from 0), into FOLDER; with `training` those of its tests alone. It needs the
CuTe DSL and a C compiler, no GPU. On the GPU machine FLA_KDA_CUTE_CACHE_DIR=FOLDER finds them. Tests take their parameters
from the tables here.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the tables, where this file is run as a script

import call_table
import covering
from gpu import models

from fla_kda_backend import planning
from fla_kda_backend.compiling import KernelSpec, builder
from fla_kda_backend.kernels.families import FAMILIES
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.kernels.wy64.contract import allows_direct

SM_COUNT = 132  # of an H200 and an H100 SXM: what planning chooses there is listed
BVS = planning.BV_CHOICES
COLUMN_SPLIT = ("exact", "robust")
SETTINGS = (*COLUMN_SPLIT, "wy64", "wy64 replay")  # of a test: the column split's arithmetic, or the 64-token kernels
WITHOUT_REPLAY = SETTINGS[:3]
OVERLAP = ("wy64 overlap", "wy64 overlap replay")  # for sequences of equal length, or one packed one
DIRECT = "wy64 direct"  # for calls without an initial state
VARIANTS = (*((setting, bv) for setting in COLUMN_SPLIT for bv in BVS), ("wy64", None), ("wy64 replay", None))


class Tensors(NamedTuple):
    """Dtypes of the tensors that FlashKDA's call may have or lack: fields of Variant."""

    initial_state: str | None
    final_state: str | None
    cu_seqlens: str | None


STANDARD = Tensors("fp32", "fp32", None)
PACKED = Tensors("fp32", "fp32", "int64")
PACKED32 = Tensors("fp32", "fp32", "int32")
NO_INITIAL = Tensors(None, "fp32", None)

# those of the golden cases, which run with every number of columns
GOLDEN = (
    STANDARD,
    PACKED,
    NO_INITIAL,
    Tensors(None, None, None),
    Tensors("bf16", "bf16", None),
    Tensors("fp32", None, None),
    Tensors(None, "fp32", "int64"),
)
# packed sequences with tails, at 32 columns
EXACT_PACKED = (
    PACKED,
    PACKED32,
    Tensors(None, "fp32", "int64"),
    Tensors(None, "bf16", "int32"),
    Tensors(None, None, "int64"),
    Tensors("bf16", "bf16", "int64"),
    Tensors("bf16", "fp32", "int64"),
    Tensors("fp32", "bf16", "int64"),
    Tensors("fp32", None, "int64"),
)
ROBUST_PACKED = (PACKED, PACKED32, Tensors(None, "fp32", "int64"), Tensors("fp32", None, "int64"))
# in segments of the time axis: setting, columns, tensors
SEGMENTED = (
    ("exact", 32, STANDARD),
    ("exact", 32, PACKED),
    ("exact", 32, Tensors("bf16", "bf16", "int64")),
    ("exact", 64, PACKED),
    ("exact", 128, PACKED),
    ("exact", 128, NO_INITIAL),
    ("robust", 32, STANDARD),
    ("robust", 32, PACKED),
    ("robust", 64, PACKED),
    ("robust", 128, PACKED),
)
# the 64-token kernels: whole, with replay, and in segments, which exclude replay
WY64_PACKED = (*ROBUST_PACKED, Tensors(None, None, "int64"), Tensors("bf16", "bf16", "int64"), Tensors(None, "bf16", "int32"))
WY64 = (STANDARD, NO_INITIAL, Tensors("fp32", None, None), Tensors(None, None, None), *WY64_PACKED)
WY64_REPLAY = (STANDARD, PACKED, PACKED32, NO_INITIAL, Tensors("fp32", None, None), Tensors("bf16", "bf16", "int64"))
WY64_OVERLAP = (STANDARD, NO_INITIAL, Tensors("fp32", None, None), PACKED, NO_INITIAL._replace(cu_seqlens="int64"))
WY64_DIRECT = tuple(Tensors(None, *rest) for rest in (
    ("fp32", None), ("fp32", "int64"), ("fp32", "int32"), (None, "int64"), ("bf16", "int64"), (None, None)))  # fmt: skip
WY64_SEGMENTED = (STANDARD, PACKED, NO_INITIAL, Tensors("bf16", "bf16", "int64"))

# every kind of call: on the 64-token kernels, and, as on GPUs without them, on the column split; with intermediate states
ROBUST_KINDS = [Variant(**row) for row in covering.rows(call_table.ARITHMETIC | call_table.STORAGE, 2, call_table.allowed)]
BY_NAME = (*call_table.BY_GATE.values(), call_table.KIMI)
STATES = tuple(
    replace(kind, intermediate_states=64)
    for kind in (call_table.FLASHKDA, replace(call_table.SOFTPLUS, cu_seqlens="int32"), call_table.KIMI)
)
REPLAYED = (call_table.SOFTPLUS, call_table.KIMI)
KEYS_FIRST = Variant(state_v_first=False, cu_seqlens="int64")  # of sequences of one chunk
# run again and again: setting, kind, runs. Rows of a K-first state take the most stores, behind which loads wait
PACKED_KIND = call_table.Kind(cu_seqlens="int64")
STATES_OFTEN = call_table.Kind(gate="given", gate_dtype="fp32", a_log=None, dt_bias=None, beta="given", beta_dtype="fp32",
                               l2norm=False, state_v_first=False, intermediate_states=32, cu_seqlens="int64")  # fmt: skip
REPEATED = (
    ("robust", STATES_OFTEN, 2000),
    ("exact", PACKED_KIND, 500),
    ("wy64", replace(STATES_OFTEN, intermediate_states=64), 500),
    ("wy64 replay", replace(STATES_OFTEN, intermediate_states=None), 500),
)

# with gradients: what models train with, packed sequences, and those that run in segments as well
TRAINED = Variant(final_state=None)
TRAINED_PACKED = replace(TRAINED, cu_seqlens="int64")
TRAINED_MODELS = tuple(replace(models.KINDS[name], final_state=None) for name in models.TRAINED)
BACKWARD_KINDS = (*BY_NAME, *(Variant(**x._asdict()) for x in (PACKED, PACKED32, NO_INITIAL)), TRAINED, TRAINED_PACKED,
                  *TRAINED_MODELS)  # fmt: skip
BACKWARD_SEGMENTED = tuple(Variant(**x._asdict()) for x in (STANDARD, PACKED, NO_INITIAL))


def family_of(setting):
    return "column_split" if setting in COLUMN_SPLIT else "wy64"


def schedule_of(setting, bv=32, segmented=False):
    """The Schedule of a setting; bv counts for the column split alone."""
    make = FAMILIES[family_of(setting)].schedule
    if setting in COLUMN_SPLIT:
        return make(arithmetic=setting, bv=bv, warps=planning.warps(setting, bv), segmented=segmented)
    words = setting.split()
    chosen = {name: name in words for name in ("overlap", "replay", "direct")}
    return make(max_ctas=SM_COUNT, **chosen, segmented=segmented)


def spec(setting, bv, tensors, segmented=False):
    """Of FlashKDA's call."""
    return spec_of(Variant(**tensors._asdict()), setting, bv, segmented)


def spec_of(variant, setting="wy64", bv=32, segmented=False):
    return KernelSpec(family_of(setting), "sm_90a", variant, schedule_of(setting, bv, segmented))


def is_direct(case):
    """Whether planning has prepare compute sequences of one chunk."""
    return allows_direct(case.kind) and sum(case.lengths) <= 64 * len(case.lengths)


def specs_of_calls():
    """Those that test_calls.py launches."""
    stateless = (replace(kind, intermediate_states=None) for kind in STATES)
    found = [spec_of(kind) for kind in (*call_table.KINDS, *BY_NAME, *STATES, *stateless)]
    found += [spec_of(case.kind, DIRECT) for case in call_table.CASES if is_direct(case)]
    found += [spec_of(KEYS_FIRST, setting) for setting in ("wy64", DIRECT)]
    found += [spec_of(kind, setting) for setting, kind, _ in REPEATED]
    found += [spec_of(kind, setting) for kind in REPLAYED for setting in ("wy64 replay", *OVERLAP)
              if kind.cu_seqlens is None or setting == "wy64 replay"]  # fmt: skip
    found += [spec_of(kind, setting) for setting, kind in models.VARIANTS]
    found += [spec_of(kind, "robust") for kind in (*ROBUST_KINDS, *STATES)]
    return found + [spec_of(replace(kind, intermediate_states=32), "robust") for kind in STATES]


def backward_spec(kind, grouped=False, wants_state=True, **schedule):
    """Of the backward of calls of a kind; wants_state: the gradient of the initial state is wanted, where there is one."""
    variant = replace(kind, final_state=None, intermediate_states=None)
    chosen = {"d_final_state": kind.final_state is not None, "grouped": grouped,
              "d_initial_state": wants_state and kind.initial_state is not None}  # fmt: skip
    made = FAMILIES["wy64_backward"].schedule(max_ctas=SM_COUNT, **(chosen | schedule))
    return KernelSpec("wy64_backward", "sm_90a", variant, made)


def specs_of_training():
    """Those that the tests of training launch: the backwards, and their forwards."""
    kinds = (*BACKWARD_KINDS, *BACKWARD_SEGMENTED, call_table.FLASHKDA)
    found = [backward_spec(kind) for kind in kinds]
    found += [backward_spec(case.kind, case.heads != call_table.QK_HEADS) for case in call_table.CASES]
    found += [backward_spec(call_table.FLASHKDA, wants_state=False), backward_spec(call_table.FLASHKDA, grouped=True)]
    found += [backward_spec(kind, beside=True) for kind in kinds]
    for kind in BACKWARD_SEGMENTED:
        found.append(backward_spec(kind, segmented=True))
        found.append(backward_spec(kind, segmented=True, stage="states", d_final_state=False, d_initial_state=False))
    found += [spec_of(kind) for kind in kinds] + [spec_of(kind, segmented=True) for kind in BACKWARD_SEGMENTED]
    found += [spec_of(case.kind, DIRECT if is_direct(case) else "wy64") for case in call_table.CASES]
    found += [spec_of(TRAINED, "wy64 overlap"), spec_of(call_table.FLASHKDA, "wy64 overlap replay")]
    return list(dict.fromkeys(found))


def needed_specs():
    rows = [("exact", bv, tensors) for bv in BVS for tensors in GOLDEN]
    rows += [("robust", bv, tensors) for bv in BVS for tensors in (STANDARD, PACKED)]
    rows += [("exact", 32, tensors) for tensors in EXACT_PACKED]
    rows += [("robust", 32, tensors) for tensors in (*ROBUST_PACKED, NO_INITIAL, Tensors("fp32", None, None))]
    rows += [("wy64", None, tensors) for tensors in WY64] + [("wy64 replay", None, tensors) for tensors in WY64_REPLAY]
    rows += [(setting, None, tensors) for setting in OVERLAP for tensors in WY64_OVERLAP]
    rows += [(DIRECT, None, tensors) for tensors in WY64_DIRECT] + [("wy64", None, tensors) for tensors in WY64_DIRECT]
    in_segments = (*SEGMENTED, *(("wy64", None, tensors) for tensors in WY64_SEGMENTED))
    found = [spec(*row) for row in rows] + [spec(*row, segmented=True) for row in in_segments]
    return list(dict.fromkeys([*found, *specs_of_calls(), *specs_of_training()]))


def main(folder, part="0", parts="1", only=None):
    for spec in (specs_of_training() if only else needed_specs())[int(part) :: int(parts)]:
        print(builder.export(spec, folder), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
