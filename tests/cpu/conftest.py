"""Fixtures that several files of this directory use."""

from fake_compiler import built, empty_library, loaded

__all__ = ["built", "empty_library", "loaded"]
