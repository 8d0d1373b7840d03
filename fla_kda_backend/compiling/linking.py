"""Link what the DSL exports into a library that needs only libtvm_ffi to run. Needs a C compiler: $CC, gcc or clang.

Without one, each process compiles its kernels in memory, and nothing is kept.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path


class Unlinkable(RuntimeError):
    """No C compiler links here, or a library that is linked with is missing."""


def linker() -> list[str]:
    """The command of a C compiler, found as Triton finds one; raises Unlinkable."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in filter(None, (chosen, ["gcc"], ["clang"])):
        if shutil.which(command[0]) is not None:
            return command
    raise Unlinkable("no C compiler: neither CC, nor gcc, nor clang names a program")


def name_of(command: list[str]) -> str:
    """What a linker() is called, without its directory."""
    return os.path.basename(command[0])


def link(kernel: str | Path | None, scratch: str | Path, command: list[str]) -> Path:
    """The Path of a library in the directory `scratch`, made of the object file `kernel` by a linker().

    Without a kernel: a library of everything else, which shows that linking works. Raises Unlinkable.
    """
    source, library = Path(scratch) / "raise.c", Path(scratch) / "kernel.so"
    source.write_text(_RAISE_CUDA_ERROR)
    inputs = [kernel, source, dsl_runtime(), cuda_runtime(), tvm_ffi_library()]
    whole = [
        *command, "-O2", "-fPIC", "-shared", "-s", "-o", str(library), "-Wl,--no-undefined",
        *(str(path) for path in inputs if path is not None), "-ldl", "-lrt", "-lpthread",
    ]  # fmt: skip
    try:
        done = subprocess.run(whole, capture_output=True, text=True)
    except OSError as error:
        raise Unlinkable(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise Unlinkable(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return library


def missing() -> str | None:
    """Why nothing can be linked on this machine, in a sentence; None where it can. Tries it, which takes about 0.1 s."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            link(None, scratch, linker())
    except Exception as error:
        return str(error)
    return None


# The DSL's static runtime calls this function to report a CUDA error, but does not contain it.
_RAISE_CUDA_ERROR = """
#include <stdio.h>
extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);
extern const char *cudaGetErrorString(int);
void CuteDSLRT_TVMFFISetRaisedCudaError(void *unused, int error) {
  char text[256];
  snprintf(text, sizeof text, "CUDA error %d: %s", error, cudaGetErrorString(error));
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
}
"""


def dsl_runtime() -> Path:
    """The DSL's static runtime."""
    import nvidia_cutlass_dsl

    return _first("libcuda_dialect_runtime_static.a", [Path(root) / "cu13" / "lib" for root in nvidia_cutlass_dsl.__path__])


def cuda_runtime() -> Path:
    """CUDA's static runtime: of the toolkit, or of the package nvidia-cuda-runtime, which torch for CUDA 13 requires."""
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", *(Path(entry) / "nvidia" / "cu13" for entry in sys.path)]
    targets = f"targets/{'sbsa' if platform.machine() == 'aarch64' else platform.machine()}-linux/lib"
    folders = [Path(root) / part for root in roots if root for part in ("lib64", "lib", targets)]
    return _first("libcudart_static.a", folders)


def tvm_ffi_library() -> Path:
    """The shared library of tvm-ffi, which also loads what is linked here."""
    import tvm_ffi.libinfo

    return Path(tvm_ffi.libinfo.find_libtvm_ffi())


def _first(name: str, folders: Iterable[Path]) -> Path:
    folders = list(folders)
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise Unlinkable(f"{name} not found in {', '.join(map(str, folders))}")
