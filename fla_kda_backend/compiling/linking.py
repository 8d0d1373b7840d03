"""Link what the DSL exports into a library that needs only libtvm_ffi to run.

By the C compiler, as Triton finds one ($CC, gcc, clang), or, where there is none, by the linker that Triton has inside for
another purpose, after the DSL's own compiler has made the one object that is ours.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

TRITON = "the linker inside Triton"


class Unlinkable(RuntimeError):
    """Nothing here can link, or what is linked with is missing."""


def linker():
    """The command (a list) of a C compiler, or TRITON; raises Unlinkable."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in filter(None, (chosen, ["gcc"], ["clang"])):
        if shutil.which(command[0]) is not None:
            return command
    try:
        from triton._C.libtriton import amd

        amd.link_hsaco  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise Unlinkable("there is neither a C compiler (CC, gcc, clang) nor the linker that Triton 3.6 has inside") from error
    return TRITON


def name_of(linker):
    return linker if linker == TRITON else os.path.basename(linker[0])


def link(kernel, scratch, linker):
    """Link the object file `kernel` by a linker(); the Path of the library, in the directory `scratch`."""
    scratch, library = Path(scratch), Path(scratch) / "kernel.so"
    with_what = [dsl_runtime(), cuda_runtime(), tvm_ffi_library()]
    if linker == TRITON:
        _link_by_triton(kernel, scratch, library, with_what)
    else:
        (scratch / "raise.c").write_text(_RAISE_CUDA_ERROR)
        command = [
            *linker, "-O2", "-fPIC", "-shared", "-s", "-o", str(library), "-Wl,--no-undefined", str(kernel),
            str(scratch / "raise.c"), *map(str, with_what), "-ldl", "-lrt", "-lpthread",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unlinkable(f"{linker[0]} failed: {done.stderr.strip()[-2000:]}")
    return library


def missing():
    """What this machine lacks for linking, in a sentence; None where nothing."""
    try:
        linker(), dsl_runtime(), cuda_runtime(), tvm_ffi_library()
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
# The same for the DSL's compiler, which must find here what it refers to, so without CUDA's text; and atexit, which a C
# compiler takes from a part of the C library that is always linked in.
_WITHOUT_C = """
llvm.mlir.global private constant @kind("RuntimeError\\00")
llvm.mlir.global private constant @format("CUDA error %d\\00")
llvm.mlir.global internal @this_library(0 : i64) : i64
llvm.func @snprintf(!llvm.ptr, i64, !llvm.ptr, ...) -> i32
llvm.func @TVMFFIErrorSetRaisedFromCStr(!llvm.ptr, !llvm.ptr)
llvm.func @__cxa_atexit(!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
llvm.func @CuteDSLRT_TVMFFISetRaisedCudaError(%unused: !llvm.ptr, %error: i32) {
  %one = llvm.mlir.constant(1 : i64) : i64
  %size = llvm.mlir.constant(64 : i64) : i64
  %text = llvm.alloca %one x !llvm.array<64 x i8> : (i64) -> !llvm.ptr
  %format = llvm.mlir.addressof @format : !llvm.ptr
  %count = llvm.call @snprintf(%text, %size, %format, %error) vararg(!llvm.func<i32 (ptr, i64, ptr, ...)>)
    : (!llvm.ptr, i64, !llvm.ptr, i32) -> i32
  %kind = llvm.mlir.addressof @kind : !llvm.ptr
  llvm.call @TVMFFIErrorSetRaisedFromCStr(%kind, %text) : (!llvm.ptr, !llvm.ptr) -> ()
  llvm.return
}
llvm.func @fla_kda_atexit(%function: !llvm.ptr) -> i32 {
  %null = llvm.mlir.zero : !llvm.ptr
  %this = llvm.mlir.addressof @this_library : !llvm.ptr
  %result = llvm.call @__cxa_atexit(%function, %null, %this) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  llvm.return %result : i32
}
"""


def _link_by_triton(kernel, scratch, library, with_what):
    from cutlass._mlir import ir
    from cutlass._mlir.execution_engine import ExecutionEngine
    from triton._C.libtriton import amd

    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(_WITHOUT_C)
        engine = ExecutionEngine(module, opt_level=2, shared_libs=[str(tvm_ffi_library())], enable_pic=True)
        engine.dump_to_object_file(str(scratch / "ours.o"))
    # It takes one file: a linker script, which names the others. The C library, for the versions of its symbols.
    inputs = " ".join(f'"{path}"' for path in (kernel, scratch / "ours.o", *with_what, *_c_library()))
    (scratch / "inputs.ld").write_text(f"INPUT({inputs})\natexit = fla_kda_atexit;\n")
    try:
        amd.link_hsaco(str(scratch / "inputs.ld"), str(library))
    except Exception as error:
        raise Unlinkable(f"{TRITON} failed: {str(error)[-2000:]}") from error


def _c_library():
    """Paths of the C library and the loader that this process runs on."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
    return sorted(path for path in paths if Path(path).name.startswith(("libc.so.", "ld-linux")))


def dsl_runtime():
    import nvidia_cutlass_dsl

    return _first(
        "libcuda_dialect_runtime_static.a",
        [Path(root) / "cu13" / "lib" for root in nvidia_cutlass_dsl.__path__],
    )


def cuda_runtime():
    """Of the CUDA toolkit, or of the package nvidia-cuda-runtime, which torch for CUDA 13 brings."""
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", *(Path(entry) / "nvidia" / "cu13" for entry in sys.path)]
    targets = f"targets/{'sbsa' if platform.machine() == 'aarch64' else platform.machine()}-linux/lib"
    folders = [Path(root) / part for root in roots if root for part in ("lib64", "lib", targets)]
    return _first("libcudart_static.a", folders)


def tvm_ffi_library():
    import tvm_ffi.libinfo

    return Path(tvm_ffi.libinfo.find_libtvm_ffi())


def _first(name, folders):
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise Unlinkable(f"{name} not found in {', '.join(map(str, folders))}")
