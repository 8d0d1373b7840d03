import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    # Read, not imported: the build environment has none of the dependencies.
    source = (HERE / "fla_kda_backend" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return found


setup(
    name="fla-kda-backend",
    version=version(),
    description="Kimi Delta Attention prefill for flash-linear-attention in CuTe DSL, found without a change of code",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    project_urls={
        "flash-linear-attention": "https://github.com/fla-org/flash-linear-attention",
        "CuTe DSL": "https://github.com/NVIDIA/cutlass",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA :: 13",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["fla_kda_backend", "fla_kda_backend.*"]),
    package_data={"fla_kda_backend": ["py.typed"]},
    install_requires=[
        "torch>=2.7",
        "triton>=3.3",
        "flash-linear-attention>=0.6",
        "nvidia-cutlass-dsl[cu13]>=4.8.1",
        "apache-tvm-ffi>=0.1.15",
    ],
    extras_require={
        "test": ["pytest", "hypothesis", "numpy", "ruff", "setuptools", "wheel"],
        "dev": ["mypy", "ruff", "pre-commit"],
    },
    entry_points={
        "torch.backends": ["fla_kda_backend = fla_kda_backend._autoload:register"],
        "console_scripts": ["fla-kda = fla_kda_backend.cli:main"],
    },
)
