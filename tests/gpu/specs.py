"""Every compiled variant that the GPU tests launch on an H200, listed so that another machine can build them.

    python tests/gpu/specs.py FOLDER [PART PARTS]

compiles them all, or part PART of PARTS (from 0), into FOLDER; needs the CuTe DSL and a C compiler, no GPU. On the GPU
machine FLA_KDA_CUTE_CACHE_DIR=FOLDER finds them. Tests take their parameters from the tables here.
"""

import sys
from typing import NamedTuple

from fla_kda_backend import planning
from fla_kda_backend.compiling import KernelSpec, builder

SM_COUNT = 132  # of an H200 and an H100 SXM: what planning chooses there is listed
BVS = planning.BV_CHOICES
SETTINGS = ("exact", "robust")


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


def variant(arithmetic, bv, kinds, segmented=False):
    return KernelSpec.of(
        "column_split",
        "sm_90a",
        arithmetic=arithmetic,
        bv=bv,
        warps=planning.warps(arithmetic, bv),
        segmented=segmented,
        **kinds._asdict(),
    )


def needed_specs():
    rows = [("exact", bv, kinds) for bv in BVS for kinds in GOLDEN]
    rows += [("robust", bv, kinds) for bv in BVS for kinds in (STANDARD, PACKED)]
    rows += [("exact", 32, kinds) for kinds in EXACT_PACKED]
    rows += [("robust", 32, kinds) for kinds in (*ROBUST_PACKED, NO_INITIAL, Kinds("fp32", None, None))]
    specs = [variant(*row) for row in rows] + [variant(*row, segmented=True) for row in SEGMENTED]
    return list(dict.fromkeys(specs))


def main(folder, part="0", parts="1"):
    for spec in needed_specs()[int(part) :: int(parts)]:
        print(builder.export(spec, folder), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
