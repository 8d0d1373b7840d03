"""What identifies a compiled kernel. Imports neither torch nor the DSL."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass, fields
from typing import Any

from .. import __version__
from ..kernels.families import FAMILIES
from ..kernels.variant import Variant

ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}  # by compute capability


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

    def __post_init__(self):
        self.schedule.check(self.variant)

    @classmethod
    def of(cls, family: str, arch: str, **options: Any) -> "KernelSpec":
        """From those options, fields of Variant and of the family's Schedule, that differ from the defaults."""
        asked = {name: options.pop(name) for name in _names(Variant) if name in options}
        return cls(family, arch, Variant(**asked), FAMILIES[family].schedule(**options))

    @functools.cached_property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """What `of` takes: the fields that differ from the defaults, sorted by name."""
        found = {}
        for part in (self.variant, self.schedule):
            found |= {f.name: value for f in fields(part) if (value := getattr(part, f.name)) != f.default}
        return tuple(sorted(found.items()))

    @property
    def name(self):
        return "-".join([self.family, *(f"{key}_{value}" for key, value in self.options), self.arch])

    def __str__(self):
        return f"{self.family} ({', '.join(f'{key}={value}' for key, value in self.options)}) for {self.arch}"

    @property
    def key(self):
        """Hash of everything that changes the generated code: the variant, this package's version, the kernel's sources."""
        everything = self.family, self.arch, self.options, __version__, source_hash(self.family)
        return hashlib.sha256(repr(everything).encode()).hexdigest()

    @property
    def stem(self):
        """What the names of this variant's files begin with; its options are inside, they would make the name too long."""
        return f"{self.family}-{self.arch}-{self.key[:24]}-{platform.machine()}-dsl"

    @property
    def file_name(self):
        """Of the file that this machine writes. The DSL's version stands apart from the key: see disk.Directory.find."""
        return f"{self.stem}{dsl_version() or 'none'}.so"


@functools.cache
def dsl_version():
    """Version of the CuTe DSL that is installed, found without importing it; None where it is not."""
    try:
        return re.sub(r"[^\w.]", "_", importlib.metadata.version("nvidia-cutlass-dsl"))
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def source_hash(family: str) -> str:
    """Hash of what a family is compiled from: its folder, the modules that all families share, builder and linking."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kernels, compiling = os.path.join(root, "kernels"), os.path.join(root, "compiling")
    paths = [os.path.join(compiling, name) for name in ("builder.py", "linking.py")]
    paths += [entry.path for entry in os.scandir(kernels)]
    paths += [os.path.join(folder, name) for folder, _, names in os.walk(os.path.join(kernels, family)) for name in names]
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.endswith(".py")):
        with open(path, "rb") as file:
            digest.update(os.path.relpath(path, root).replace(os.sep, "/").encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()


def _names(part: type) -> list[str]:
    return [field.name for field in fields(part)]


def specs_for_demo(arch="sm_90a"):
    """The kernels of the demo's call: those of auto mode on this arch, where it has its own, and the column split's two."""
    column_split = [
        KernelSpec.of("column_split", arch, arithmetic=arithmetic, initial_state="fp32") for arithmetic in ("exact", "robust")
    ]
    return [KernelSpec.of("wy64", arch, initial_state="fp32"), *column_split] if arch == "sm_90a" else column_split
