"""`python -m benchmarks.models`: the prefill of whole FLA models, with this backend and without it, in turns.

Each model's KDA layers must all have run on the kernels and its logits agree with those of FLA's Triton path, or it gets
FAIL and no line in the CSV, and the exit status is 1.
"""

import argparse
import csv
from datetime import datetime, timezone
from typing import NamedTuple

from fla_kda_backend import dispatch_log, register
from fla_kda_backend.cli import _models, demo
from fla_kda_backend.cli._table import table

from . import results, specs
from .bench import names_of
from .implementations import IMPLEMENTATIONS

TOKENS = 8192
ROUNDS = 15
ON_OFF = {True: IMPLEMENTATIONS["auto"], False: IMPLEMENTATIONS["triton"]}
COLUMNS = "date gpu torch fla version model layers heads tokens us_on us_off ratio logits_rel_diff".split()
CSV = results.H200.with_name("models.csv")


class Shape(NamedTuple):
    """A model of _models.MODELS by its sizes; heads are those of q and k."""

    model: str
    layers: int = 4
    heads: int = 16
    hidden: int = 2048

    def config(self):
        return _models.config(*self)


SHAPES = {name: Shape(name) for name in _models.MODELS}
SHAPES["kimi"] = Shape("kda", layers=1, heads=32, hidden=2304)  # a layer of Kimi-Linear-48B


def needed_specs():
    """Compiled kernels of all models, on an H200."""
    calls = [call for shape in SHAPES.values() for call in layer_calls(shape).values()]
    return list(dict.fromkeys(spec for call in calls for spec in specs.of_mode(call, "auto")))


def layer_calls(shape):
    with _models.attention():
        return _models.layer_calls(shape.config(), TOKENS)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of(SHAPES), default="all", help="all, or names with commas between")
    parser.add_argument("--out", default=CSV, help="the CSV that lines are appended to")
    chosen = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    register()  # for a checkout that is not installed
    run = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **results.machine()}
    run = {name: run[name] for name in COLUMNS if name in run}
    rows = []
    with torch.no_grad(), _models.attention():
        for name in chosen.models:
            shape = SHAPES[name]
            measured, failures = measure(_models.build(shape.config(), "cuda"))
            for line in failures:
                print(f"FAIL  {name} {line}", flush=True)
            if not failures:
                rows.append({**run, **row(name, shape, *measured)})
                append(chosen.out, rows[-1:])
            print(f"done  {name}", flush=True)
            torch.cuda.empty_cache()
    print("\n".join(summary(rows)))
    return 0 if len(rows) == len(chosen.models) else 1


def measure(model):
    """((us_on, us_off, relative difference of the logits), lines about failures).

    A time is from an idle GPU to an idle GPU, the host's part included.
    """
    ids = _models.random_tokens(model.config, model.device, tokens=TOKENS)

    def prefill(on, logits_to_keep=1):  # one, as before generating
        with ON_OFF[on].selected():
            return model(ids, use_cache=True, logits_to_keep=logits_to_keep).logits

    logits, failures = {}, []
    for on, implementation in ON_OFF.items():
        with dispatch_log.capture() as seen:
            logits[on] = prefill(on, logits_to_keep=0)
        calls = len(_models.kda_layers(model)) if on else 0
        if [record.outcome for record in seen] != [dispatch_log.ACCEPTED] * calls:
            why = sorted({f"{record.outcome}: {record.code}: {record.message}" for record in seen})
            failures.append(f"{implementation.name}: FLA asked for {len(seen)} calls, not {calls}, or: {'; '.join(why)}")
    difference = demo.relative_error(logits.pop(True), logits.pop(False))
    if not difference <= demo.MODEL_LIMIT:
        failures.append(f"logits differ by {difference:.1e}, limit {demo.MODEL_LIMIT:.1e}")
    times = (None, None) if failures else demo.interleaved_times(prefill, model.device, ROUNDS)
    return (*times, difference), failures


def row(name, shape, us_on, us_off, difference):
    return {
        "model": name,
        "layers": shape.layers,
        "heads": shape.heads,
        "tokens": TOKENS,
        "us_on": f"{us_on:.1f}",
        "us_off": f"{us_off:.1f}",
        "ratio": f"{us_off / us_on:.3f}",
        "logits_rel_diff": f"{difference:.2e}",
    }


def append(path, rows):
    """Append rows (dicts of COLUMNS) to the CSV at `path`, with a header where it is new."""
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def summary(rows):
    names = COLUMNS[COLUMNS.index("model") :]
    return table(names, [[each[name] for name in names] for each in rows])


if __name__ == "__main__":
    raise SystemExit(main())
