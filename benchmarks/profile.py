"""`python -m benchmarks.profile --case NAME --impl NAME`: where the time of one call goes, kernel by kernel.

The bytes of a kernel are counted, not measured: what it must read and write once, workspace included. The floor of the
call is its inputs read once and its outputs written once at the rate of a large copy on the same GPU.
"""

import argparse
import re
import statistics

from fla_kda_backend import register
from fla_kda_backend.cli._table import table
from fla_kda_backend.kernels.column_split import record as record16
from fla_kda_backend.kernels.wy64 import record as record64

from . import cases, checks
from .implementations import IMPLEMENTATIONS

CALLS = 20
COPY_BYTES = 1 << 30
OUR_KERNEL = re.compile(r"fla_kda_backendkernels[a-z0-9_]*?([A-Z][A-Za-z0-9]*)_object")
ROW = 2 * cases.DIM  # a token and head of v or out
# what a link without outputs reads of a record
SPINE_BYTES = record64.W_BYTES + 2 * record64.U_BYTES + record64.DECAY_BYTES + record64.K_END_BYTES


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=cases.CASES, default="fixed-T8192-H6")
    parser.add_argument("--impl", choices=IMPLEMENTATIONS, default="auto")
    parser.add_argument("--gate", choices=cases.GATES, default="mixed")
    chosen = parser.parse_args(arguments)
    import torch

    register()  # for a checkout that is not installed
    case, implementation = cases.CASES[chosen.case], IMPLEMENTATIONS[chosen.impl]
    with torch.no_grad(), implementation.selected():
        sets = cases.input_sets(case, chosen.gate)

        def one_round():
            for inputs in sets:
                implementation(inputs)

        one_round()
        times = checks.launched(one_round, max(1, CALLS // len(sets)))
    times = {name: value / len(sets) for name, value in times.items()}
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: {case.name}, {chosen.gate} gate, {chosen.impl}")
    print("\n".join(breakdown(case, times, rate)))
    return 0


def breakdown(case, times, rate):
    """Lines about {kernel's name: microseconds per call} with a copy rate in bytes per microsecond."""
    total, floor = sum(times.values()), case.floor_bytes / rate
    rows, counted = [], 0
    for name, value in times.items():
        found = OUR_KERNEL.search(name)
        short = found.group(1) if found else name[:60]
        moved = traffic(case, short)
        counted += moved or 0
        counts = () if moved is None else (moved / 1e6, moved / value / 1e6, moved / rate)
        cells = [f"{count:.2f}" for count in counts] or [""] * 3
        rows.append((short, round(value, 1), f"{value / total:.0%}", *cells))
    lines = table(("kernel", "us", "share", "MB counted", "TB/s", "us at copy rate"), rows)
    lines.append(f"all kernels {total:.1f} us, {total / floor:.1f} times the floor of {floor:.1f} us:")
    lines.append(f"{case.floor_bytes / 1e6:.1f} MB in and out at {rate / 1e6:.2f} TB/s, the rate of a large copy")
    if counted:
        lines.append(f"counted {counted / 1e6:.1f} MB, {counted / case.floor_bytes:.2f} times the floor's bytes")
    return lines


def traffic(case, kernel):
    """Bytes that one of our kernels must move for the case, each once; None for other kernels.

    The CTAs that share a head read the same records: all reads but one are taken to hit the L2 cache. The replay reads records
    again long after the spine did: both reads are counted.
    """
    rows = case.tokens * case.heads
    states = case.sequences * case.heads * 4 * cases.DIM * cases.DIM
    chunks16 = case.heads * sum(chunks(case, record16.CHUNK))
    chunks64 = case.heads * sum(chunks(case, record64.CHUNK))
    stretches = [max(count - 1, 0) // record64.CHUNKS_PER_CHECKPOINT for count in chunks(case, record64.CHUNK)]
    replayed = case.heads * record64.CHUNKS_PER_CHECKPOINT * sum(stretches)
    checkpoints = case.heads * sum(max(count - 1, 0) for count in stretches)
    chain = chunks64 * record64.RECORD_BYTES + rows * ROW + states
    inputs = case.prepared_bytes
    return {
        "PrepareChunk16": inputs + chunks16 * record16.RECORD_BYTES,
        "RecurrenceSplit": chunks16 * record16.RECORD_BYTES + rows * 2 * ROW + states,
        "PrepareWY64": inputs + rows * ROW + chunks64 * record64.RECORD_BYTES,
        "ChainWY64": chain,
        "ChainReplayWY64": chain + replayed * SPINE_BYTES + 2 * checkpoints * 2 * record64.STATE_BYTES,
    }.get(kernel)


def chunks(case, size):
    """Chunks of each sequence."""
    return [-(-length // size) for length in case.lengths]


def copy_rate():
    """Bytes read and written per microsecond by a large device-to-device copy."""
    import torch

    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    took = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1e3)
    return 2 * COPY_BYTES / statistics.median(took[2:])


if __name__ == "__main__":
    raise SystemExit(main())
