"""Compile a spec with the CuTe DSL. The only module outside kernels/ that imports the DSL; needs no GPU."""

import importlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from .spec import FAMILIES

_one_at_a_time = threading.RLock()  # the DSL's tracer keeps global state


class Artifact(NamedTuple):
    """`function` launches with the kernel's arguments and the stream's handle; cubin and ptx only where asked for."""

    function: Any
    cubin: bytes | None
    ptx: str | None
    smem_bytes: dict[str, int]  # dynamic shared memory by kernel class


def build(spec, keep=True):
    """Trace and compile; about a second. `keep`: return the cubin and PTX too."""
    # The DSL takes its target from the environment at import, and serves one target a process.
    chosen = os.environ.setdefault("CUTE_DSL_ARCH", spec.arch)
    if chosen != spec.arch:
        raise RuntimeError(f"this process compiles for {chosen} (CUTE_DSL_ARCH), not for {spec.arch}")
    with _one_at_a_time:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream

        module, name = FAMILIES[spec.family]
        kernel = getattr(importlib.import_module(module), name)(**dict(spec.options))
        make = {"l": cutlass.Int64, "f": cutlass.Float32, "i": cutlass.Int32}
        arguments = [make[letter](1) for letter in kernel.arguments]
        options = f"--gpu-arch {spec.arch} --enable-tvm-ffi"
        with tempfile.TemporaryDirectory() as folder:
            if keep:
                options += f" --keep-ptx --keep-cubin --dump-dir {folder}"
            function = cute.compile(kernel, *arguments, make_fake_stream(), options=options)
            artifacts = function.artifacts if keep else None
            return Artifact(
                function,
                artifacts.CUBIN if keep else None,
                artifacts.PTX if keep else None,
                kernel.smem_bytes(),
            )


def export(spec, folder):
    """Compile and link into folder/spec.file_name, a library that needs only libtvm_ffi to run; needs a C compiler."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    function = build(spec, keep=False).function
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        scratch = Path(scratch)
        function.export_to_c(str(scratch / "kernel.o"), "launch")
        (scratch / "raise.c").write_text(_RAISE_CUDA_ERROR)
        library = scratch / "kernel.so"
        command = [
            "gcc", "-O2", "-fPIC", "-shared", "-s", "-o", str(library), "-Wl,--no-undefined", str(scratch / "kernel.o"),
            str(scratch / "raise.c"), str(_dsl_runtime()), str(_cuda_runtime()), f"-L{_tvm_ffi_folder()}", "-ltvm_ffi",
            "-lstdc++", "-ldl", "-lrt", "-lpthread",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"linking {spec} failed: {done.stderr.strip()[-2000:]}")
        os.replace(library, folder / spec.file_name)
    return folder / spec.file_name


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


def _dsl_runtime():
    import nvidia_cutlass_dsl

    return _first(
        "libcuda_dialect_runtime_static.a",
        [Path(root) / "cu13" / "lib" for root in nvidia_cutlass_dsl.__path__],
    )


def _cuda_runtime():
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", *(Path(entry) / "nvidia" / "cu13" for entry in sys.path)]
    folders = [Path(root) / part for root in roots if root for part in ("lib64", "lib")]
    return _first("libcudart_static.a", folders)


def _tvm_ffi_folder():
    import tvm_ffi.libinfo

    return Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent


def _first(name, folders):
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise RuntimeError(f"{name} not found in {', '.join(map(str, folders))}")
