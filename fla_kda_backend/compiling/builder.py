"""Compile a spec with the CuTe DSL; needs no GPU. The only module outside kernels/ that imports the DSL."""

import importlib
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels import arguments
from ..kernels.families import FAMILIES
from . import linking
from .disk import Directory
from .spec import KernelSpec

_one_at_a_time = threading.RLock()  # the DSL's tracer keeps global state


class Artifact(NamedTuple):
    """A compiled spec; cubin and ptx only where asked for."""

    function: Any  # called with the family's Arguments and the stream's handle
    cubin: bytes | None
    ptx: str | None
    smem_bytes: dict[str, int]  # dynamic shared memory per kernel class


def build(spec: KernelSpec, keep: bool = True) -> Artifact:
    """Trace and compile; takes about a second. `keep`: return the cubin and PTX too."""
    # The DSL takes its target from the environment at import, and serves one target per process.
    chosen = os.environ.setdefault("CUTE_DSL_ARCH", spec.arch)
    if chosen != spec.arch:
        raise RuntimeError(f"this process compiles for {chosen} (CUTE_DSL_ARCH), not for {spec.arch}")
    with _one_at_a_time:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream

        family = FAMILIES[spec.family]
        module, name = family.kernel
        kernel = getattr(importlib.import_module(module), name)(spec.variant, spec.schedule)
        made_of = {
            arguments.Address: cutlass.Int64,
            arguments.Stride: cutlass.Int64,
            arguments.Real: cutlass.Float32,
            arguments.Count: cutlass.Int32,
        }
        placeholders = [made_of[kind](1) for kind in arguments.kinds(family.addresses, family.numbers)]
        options = f"--gpu-arch {spec.arch} --enable-tvm-ffi"
        with tempfile.TemporaryDirectory() as folder:
            if keep:
                options += f" --keep-ptx --keep-cubin --dump-dir {folder}"
            function = cute.compile(kernel, *placeholders, make_fake_stream(), options=options)
            cubin, ptx = (function.artifacts.CUBIN, function.artifacts.PTX) if keep else (None, None)
            return Artifact(function, cubin, ptx, kernel.smem_bytes())


def link(function: Any) -> tuple[bytes, str]:
    """(bytes, the linker's name) of a library with an Artifact's function; raises linking.Unlinkable."""
    linker = linking.linker()
    with tempfile.TemporaryDirectory() as scratch:
        with _one_at_a_time:
            function.export_to_c(f"{scratch}/kernel.o", "launch")
        return linking.link(f"{scratch}/kernel.o", scratch, linker).read_bytes(), linking.name_of(linker)


def export(spec: KernelSpec, folder: str | Path) -> Path:
    """Compile and link into folder / spec.file_name, and replace what is there already; its Path. Needs no GPU."""
    library, linked_by = link(build(spec, keep=False).function)
    return Directory(folder).add(spec, library, linked_by=linked_by)


def _after_fork() -> None:
    # A thread of the parent may have held the lock.
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
