"""Compiled kernels: what one is (spec), how it is made (builder), where a process finds it (library)."""

from .spec import ARCHS, KernelSpec, specs_for_demo

__all__ = ["ARCHS", "KernelSpec", "build", "specs_for_demo"]


def build(spec):
    """Compile `spec` on this machine, GPU or not; imports the DSL. Returns a builder.Artifact."""
    from .builder import build as build_now

    return build_now(spec)
