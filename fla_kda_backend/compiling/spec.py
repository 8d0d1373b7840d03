"""What identifies a compiled kernel. Imports neither torch nor the DSL."""

import functools
import hashlib
import importlib.metadata
import platform
import re
from pathlib import Path
from typing import NamedTuple

from .. import __version__

FAMILIES = {  # module and class of the kernel
    "column_split": ("fla_kda_backend.kernels.column_split", "ColumnSplit"),
    "wy64": ("fla_kda_backend.kernels.wy64", "WY64"),
}
ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}  # by compute capability


class KernelSpec(NamedTuple):
    """One compiled variant: family names the class that builds it, options are that class's arguments, sorted by name."""

    family: str
    arch: str
    options: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, family, arch, **options):
        return cls(family, arch, tuple(sorted(options.items())))

    @property
    def name(self):
        return "-".join([self.family, *(f"{key}_{value}" for key, value in self.options), self.arch])

    def __str__(self):
        return f"{self.family} ({', '.join(f'{key}={value}' for key, value in self.options)}) for {self.arch}"

    @property
    def key(self):
        """Hash of everything that changes the generated code: the variant, this package's version, the kernel's sources."""
        return hashlib.sha256(repr((tuple(self), __version__, source_hash(self.family))).encode()).hexdigest()

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
def source_hash(family):
    """Hash of builder, linking, and of the family's module with every module of kernels/ that it imports, directly or not."""
    root = Path(__file__).resolve().parent.parent.parent
    module, _ = FAMILIES[family]
    paths = {root / f"fla_kda_backend/compiling/{name}.py" for name in ("builder", "linking")}
    waiting = [root / f"{module.replace('.', '/')}.py"]
    while waiting:
        path = waiting.pop()
        if path not in paths:
            paths.add(path)
            waiting += _imports(path, root)
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# Parsing the files for real would be most of a warm first call's time. Comments that look like this do no harm.
_IMPORT = re.compile(r"^[ \t]*from[ \t]+(fla_kda_backend\.kernels[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


def _imports(path, root):
    """Files of this package's kernels that the file at `path` imports."""
    names = []
    for module, imported in _IMPORT.findall(path.read_text(encoding="utf-8")):
        names += [module, *(f"{module}.{name}" for name in re.findall(r"\w+", imported))]
    return [file for name in names if (file := root / f"{name.replace('.', '/')}.py").is_file()]


def specs_for_demo(arch="sm_90a"):
    """The kernels of the demo's call: those of auto mode on this arch, where it has its own, and the column split's two."""
    column_split = [
        KernelSpec.of("column_split", arch, arithmetic=arithmetic, bv=32, warps=4, initial="fp32")
        for arithmetic in ("exact", "robust")
    ]
    return [KernelSpec.of("wy64", arch, initial="fp32"), *column_split] if arch == "sm_90a" else column_split
