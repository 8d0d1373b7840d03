"""The CSV of results: one line for each case and implementation, appended, never changed."""

import csv
import os
import subprocess
from importlib import metadata
from pathlib import Path

COLUMNS = (
    "date gpu driver torch triton fla dsl version command case tokens sequences heads gate impl kernel"
    " graph_us graph_p20 graph_p80 eager_us host_us err_out err_state"
).split()
H200 = Path(__file__).parent / "results" / "h200.csv"


def append(path, rows):
    """Append rows (dicts of COLUMNS) to the CSV at `path`, with a header where it is new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path):
    """The rows as dicts of text. Raises ValueError where the columns are others."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise ValueError(f"{path} must have the columns {', '.join(COLUMNS)}, got {reader.fieldnames}")
        return list(reader)


def newest(rows):
    """The rows of the run that began last."""
    last = max((row["date"] for row in rows), default=None)
    return [row for row in rows if row["date"] == last]


def machine():
    """The columns that tell where a number was measured, and on what software."""
    import torch
    import triton

    from fla_kda_backend import __version__

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fla": installed("flash-linear-attention") or "unknown",
        # Where the kernels were compiled elsewhere, that machine's DSL is what counts, and only the user knows it.
        "dsl": installed("nvidia-cutlass-dsl") or os.environ.get("FLA_KDA_BENCH_DSL") or "prebuilt",
        "version": __version__,
    }


def installed(distribution):
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
