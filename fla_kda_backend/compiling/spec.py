"""What identifies a compiled kernel. Imports neither torch nor the DSL."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .. import __version__
from ..kernels.families import FAMILIES
from ..kernels.variant import Variant

ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}  # by compute capability
FILE_NAME = r"\w+-sm_\w+-[0-9a-f]{24}-\w+-dsl[\w.]+\.so"  # the form of KernelSpec.file_name, of any version of this package


@dataclass(frozen=True)
class KernelSpec:
    """One compiled variant of a family of families.FAMILIES for one architecture.

    Raises:
        ValueError: the schedule does not fit the variant.
    """

    family: str
    arch: str
    variant: Variant
    schedule: Any  # the family's Schedule

    def __post_init__(self) -> None:
        self.schedule.check(self.variant)

    @classmethod
    def of(cls, family: str, arch: str, **options: Any) -> "KernelSpec":
        """From options, which are fields of Variant and of the family's Schedule; the others have their defaults.

        Raises:
            TypeError: an option that neither has.
            ValueError: a value that is not allowed, or not together with the others.
        """
        asked = {name: options.pop(name) for name in _names(Variant) if name in options}
        return cls(family, arch, Variant(**asked), FAMILIES[family].schedule(**options))

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> "KernelSpec":
        """From to_dict(), also after JSON. ValueError where that is of another version and has no such kernel in this one."""
        try:
            return cls.of(description["family"], description["arch"], **dict(description["options"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this version has no such kernel: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Family, architecture and options, as JSON can hold them."""
        return {"family": self.family, "arch": self.arch, "options": [list(option) for option in self.options]}

    @functools.cached_property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """(name, value) of the fields of variant and schedule that differ from their defaults, sorted by name."""
        found: dict[str, Any] = {}
        for part in (self.variant, self.schedule):
            found |= {f.name: value for f in fields(part) if (value := getattr(part, f.name)) != f.default}
        return tuple(sorted(found.items()))

    @property
    def name(self) -> str:
        """The spec in letters, digits, underscores and hyphens."""
        return "-".join([self.family, *(f"{name}_{value}" for name, value in self.options), self.arch])

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.family} ({options or 'all defaults'}) for {self.arch}"

    @property
    def key(self) -> str:
        """Hash of everything that changes the generated code: the options, this package's version, the kernel's sources."""
        everything = self.family, self.arch, self.options, __version__, source_hash(self.family)
        return hashlib.sha256(repr(everything).encode()).hexdigest()

    @property
    def stem(self) -> str:
        """What the names of this variant's files begin with. Its options are inside the file: here they would be too long."""
        return f"{self.family}-{self.arch}-{self.key[:24]}-{platform.machine()}-dsl"

    @property
    def file_name(self) -> str:
        """Name of the file that this machine writes. The DSL's version is no part of the key: see disk.Directory.find."""
        return f"{self.stem}{dsl_version() or 'none'}.so"


@functools.cache
def dsl_version() -> str | None:
    """Version of the installed CuTe DSL, found without importing it; None where there is none."""
    try:
        return re.sub(r"[^\w.]", "_", importlib.metadata.version("nvidia-cutlass-dsl"))
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def source_hash(family: str) -> str:
    """Hash of the files that a family is compiled from: its folder, the modules that all families share, builder, linking.

    Which of them a kernel imports is not looked at: so a change of any of them makes the family's kernels stale.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kernels, compiling = os.path.join(root, "kernels"), os.path.join(root, "compiling")
    paths = [os.path.join(compiling, name) for name in ("builder.py", "linking.py")]
    paths += [entry.path for entry in os.scandir(kernels)]
    room = FAMILIES[family].kernel[0].split(".")[2]  # the folder of kernels/ that the family shares with no other, or few
    paths += [os.path.join(folder, name) for folder, _, names in os.walk(os.path.join(kernels, room)) for name in names]
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.endswith(".py")):
        with open(path, "rb") as file:
            content = file.read()
        name = os.path.relpath(path, root).replace(os.sep, "/")
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _names(part: type) -> list[str]:
    return [field.name for field in fields(part)]


def specs_for_demo(arch: str = "sm_90a", training: bool = False) -> list[KernelSpec]:
    """The kernels of the demo's call: column_split in both arithmetics, and before them wy64 where the arch has it.

    training: those of its step, on sm_90a alone.
    """
    if training:
        return [KernelSpec.of(family, "sm_90a", final_state=None) for family in ("wy64", "wy64_backward")]
    specs = [KernelSpec.of("column_split", arch, arithmetic=each, initial_state="fp32") for each in ("exact", "robust")]
    return [KernelSpec.of("wy64", arch, initial_state="fp32"), *specs] if arch == "sm_90a" else specs
