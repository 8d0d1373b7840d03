"""Compiled kernels: what one is (spec), how it is made (builder), where a process finds it (library)."""

from typing import TYPE_CHECKING

from .spec import ARCHS, KernelSpec, specs_for_demo

if TYPE_CHECKING:
    from .builder import Artifact

__all__ = ["ARCHS", "KernelSpec", "build", "specs_for_demo"]


def build(spec: KernelSpec) -> "Artifact":
    """Compile `spec` on this machine, with or without a GPU; imports the DSL."""
    from .builder import build as build_now

    return build_now(spec)
