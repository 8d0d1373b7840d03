"""Compile kernels for one architecture and say what is in them.

    python compile_matrix.py FAMILY ARCH OPTIONS.json REPORT.json

Each architecture takes a process of its own, because the DSL takes its target at import. The disassemblers are Triton's.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as this file is run as a script

import outstanding

CLASSES = ("PrepareChunk16", "RecurrenceSplit", "PrepareWY64", "ChainWY64", "ChainReplayWY64", "ChainStates", "ReverseChain",
           "LocalGradients")  # fmt: skip
# The copy engine sees what other threads wrote only after each one's fence and a barrier.
FENCED_STORE = r"fence\.proxy\.async.*bar(?:rier)?\.(?:cta\.)?sync.*cp\.async\.bulk\.global"


def report(spec):
    from fla_kda_backend import compiling

    begin = time.perf_counter()
    artifact = compiling.build(spec)
    took = time.perf_counter() - begin
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(artifact.cubin)
        file.flush()
        usage = disassembler("cuobjdump", "-res-usage", file.name)
        sass = disassembler("nvdisasm", "-c", "-hex", file.name)
    kernels = {}
    for function, registers, stack in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", usage):
        kernels[class_of(function)] = {"registers": int(registers), "stack": int(stack)}
    for section in re.split(r"^\s*\.section\s+\.text\.", sass, flags=re.M)[1:]:
        opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?((?:WARPGROUP\.)?[A-Z][A-Z0-9]*)", section, flags=re.M)
        kernel = kernels[class_of(section.split(",")[0])]
        kernel["sass"], kernel["handovers"] = Counter(opcodes), outstanding.handovers(section)
    for name, body in re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", artifact.ptx, flags=re.S):
        kernels[class_of(name)]["fenced"] = bool(re.search(FENCED_STORE, body, re.S))
        opcodes = re.findall(r"^\s*(?:@!?%p\d+\s+)?\{?\s*([a-z][\w.:]+)", body, flags=re.M)
        kernels[class_of(name)]["ptx"] = Counter(opcodes)
    return {"seconds": took, "target": re.search(r"^\.target (\w+)", artifact.ptx, re.M)[1],
            "smem_bytes": artifact.smem_bytes, "kernels": kernels}  # fmt: skip


def class_of(function):
    """The kernel's class, from the name that the DSL gives its function."""
    return re.search(rf"({'|'.join(CLASSES)})_object_at", function)[1]


def disassembler(tool, *arguments):
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def main(family, arch, options_file, report_file):
    os.environ["CUTE_DSL_ARCH"] = arch
    from fla_kda_backend.compiling import KernelSpec

    options = json.loads(Path(options_file).read_text())
    Path(report_file).write_text(json.dumps([report(KernelSpec.of(family, arch, **one)) for one in options]))


if __name__ == "__main__":
    main(*sys.argv[1:])
