"""`fla-kda doctor`: what is installed, which GPUs there are, whether FLA asks us, how the switches are set.

Every probe is guarded, so that the others are printed whatever is broken.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import Variable

PACKAGES = (
    "fla-kda-backend",
    "torch",
    "triton",
    "flash-linear-attention",
    "fla-core",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
    "flash-kda",
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="versions, GPU, registration, switches, cache")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine()
    print(json.dumps(report, indent=2, default=str) if args.json else "\n".join(text(report)))
    return 0


def examine() -> dict[str, Any]:
    """What each probe found, by its name; {"error": ...} where one raised."""
    report: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for probe in (versions, gpus, cuda_match, registration, switches, cache):
            try:
                report[probe.__name__] = probe()
            except Exception as error:
                report[probe.__name__] = {"error": f"{type(error).__name__}: {error}"}
    return report


def text(report: dict[str, Any]) -> Iterator[str]:
    """The lines of examine()'s report."""
    for name, found in report.items():
        yield f"{name.replace('_', ' ')}:"
        parts = found if isinstance(found, list) else [found]
        for part in parts or ["none"]:
            if not isinstance(part, dict):
                yield f"  {part}"
                continue
            width = max(map(len, part), default=0)
            yield from (f"  {key.ljust(width)}  {'-' if value is None else value}" for key, value in part.items())


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def gpus() -> list[dict[str, Any]]:
    import torch

    from .. import eligibility

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        if torch.version.hip is not None or capability not in eligibility.RUN + eligibility.COMPILED_ONLY:
            support = "not supported: every call is left to FLA"
        else:
            support = "runs" if capability in eligibility.RUN else "compiled only: checked against FLA at the first call"
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": "{}.{}".format(*capability),
                "multiprocessors": properties.multi_processor_count,
                "support": support,
                "training": trains(capability),
            }
        )
    return found


def trains(capability: tuple[int, int]) -> str:
    """Whether calls that need gradients run on such a GPU."""
    import torch

    from .. import config, eligibility

    if torch.version.hip is not None or capability not in eligibility.TRAINED:
        return "left to FLA"
    return "runs" if config.TRAINING.get() else f"switched off by {config.TRAINING.name}"


def cuda_match() -> dict[str, str | None]:
    """CUDA's version in torch, in the driver, and in the DSL's libraries."""
    import torch

    packages = versions()
    installed = [name[-2:] for name in PACKAGES if "libs-cu" in name and packages[name]]
    cuda, driver = torch.version.cuda, driver_cuda()
    if cuda is None:
        verdict = "torch is built without CUDA: no kernel can run"
    elif driver is not None and int(driver.split(".")[0]) < int(cuda.split(".")[0]):
        verdict = f"mismatch: calls are left to FLA, for the kernels need a driver for CUDA {cuda.split('.')[0]}"
    elif cuda.split(".")[0] in installed:
        verdict = "ok"
    else:
        verdict = f"mismatch: install nvidia-cutlass-dsl with the libraries for CUDA {cuda.split('.')[0]}"
    return {"torch": cuda, "driver": driver, "dsl libraries": ", ".join(installed) or None, "verdict": verdict}


def driver_cuda() -> str | None:
    try:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"
    except (OSError, AttributeError):
        return None


def registration() -> dict[str, str]:
    """The state in this process before and after the import of FLA's KDA."""
    import torch  # noqa: F401

    from .. import _autoload

    before, _ = _autoload.status()
    importlib.import_module("fla.ops.kda")
    state, detail = _autoload.status()
    return {"after import torch": before, "after import fla.ops.kda": state, "detail": detail}


def switches() -> dict[str, str]:
    from .. import config

    found = {variable.name: shown(variable) for variable in config.VARIABLES}
    for name in config.unknown():
        found[name] = f"no such variable (set to {os.environ[name]!r})"
    for name in ("FLA_DISABLE_BACKEND_DISPATCH", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        found[name] = "not set" if name not in os.environ else f"{os.environ[name]!r} (counts at import)"
    return found


def shown(variable: "Variable") -> str:
    raw = os.environ.get(variable.name)
    value = variable.get()
    if variable.choices is not None:
        value = next(choice for choice, meaning in variable.choices.items() if meaning == value)
    how = "default" if raw is None else f"set to {raw!r}"
    if raw and not variable.accepts(raw):
        how += f", which is not {variable.expected}: the default holds"
    return f"{'not set' if value is None else value} ({how})"


def cache() -> dict[str, Any]:
    from .. import config
    from ..compiling import disk

    folder, reason = config.find_cache_dir()
    off = "off" if reason is None else f"none: {reason}"
    found: dict[str, Any] = {"folder": off if folder is None else str(folder), "compiling": how_compiled()}
    if folder is None:
        return found
    found["limit"] = f"{config.CACHE_MIB.get()} MiB"
    found["writable"] = os.access(next(p for p in (folder, *folder.parents) if p.exists()), os.W_OK)
    try:
        kernels = disk.Directory(folder).stored()
    except (OSError, disk.Unusable) as error:
        return {**found, "not used": str(error)}
    found["kernels"], found["bytes"] = len(kernels), sum(kernel.size for kernel in kernels)
    usable = [kernel.description for kernel in kernels if kernel.problem is None and kernel.description is not None]
    found["for"] = ", ".join(sorted({f"{about['arch']} by DSL {about['dsl']}" for about in usable})) or None
    found["not usable"] = len(kernels) - len(usable)
    return found


def how_compiled() -> str:
    """What happens here to a kernel that the cache does not hold, and in what form it is kept."""
    from .. import config
    from ..compiling import linking, spec

    if spec.dsl_version() is None:
        return "no CuTe DSL here: runs the kernels in the folder, which tvm-ffi loads; other calls are left to FLA"
    lacking = linking.missing()
    if lacking is not None:
        return f"in each process, in memory, because nothing can be linked here: {lacking}"
    if config.find_cache_dir()[0] is None:
        return "in each process, in memory"
    return f"once, into the folder, linked by {linking.name_of(linking.linker())} and loaded by tvm-ffi"
