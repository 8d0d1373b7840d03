"""What identifies a compiled kernel. Imports neither torch nor the DSL."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
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
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    files = _kernels(root)
    own = (f"fla_kda_backend/compiling/{name}.py" for name in ("builder", "linking"))
    contents = {name: _read(root, name) for name in own}
    waiting = [files[FAMILIES[family][0]]]
    while waiting:
        name = waiting.pop()
        if name not in contents:
            contents[name] = _read(root, name)
            waiting += [files[module] for module in _imported(contents[name]) if module in files]
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


def _read(root, name):
    with open(os.path.join(root, name), "rb") as file:
        return file.read()


def _kernels(root):
    """Module of kernels/ -> its file, from the root."""
    files = {}
    for folder, _, names in os.walk(os.path.join(root, "fla_kda_backend", "kernels")):
        for name in names:
            if name.endswith(".py") and name != "__init__.py":
                path = os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")
                files[path.removesuffix(".py").replace("/", ".")] = path
    return files


# Parsing the files for real would be most of a warm first call's time. Comments that look like this do no harm.
_IMPORT = re.compile(rb"^[ \t]*from[ \t]+(fla_kda_backend\.kernels[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


def _imported(source):
    """Modules that a kernel's source imports from kernels/, and names that may be modules."""
    names = []
    for module, imported in _IMPORT.findall(source):
        module = module.decode()
        names += [module, *(f"{module}.{name.decode()}" for name in re.findall(rb"\w+", imported))]
    return names


def specs_for_demo(arch="sm_90a"):
    """The kernels of the demo's call: those of auto mode on this arch, where it has its own, and the column split's two."""
    column_split = [
        KernelSpec.of("column_split", arch, arithmetic=arithmetic, bv=32, warps=4, initial="fp32")
        for arithmetic in ("exact", "robust")
    ]
    return [KernelSpec.of("wy64", arch, initial="fp32"), *column_split] if arch == "sm_90a" else column_split
