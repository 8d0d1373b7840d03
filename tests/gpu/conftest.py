"""What the GPU tests share: the order of markers, and the check that they launch only what specs.py lists."""

import pytest
import torch
from gpu import specs

from fla_kda_backend import op


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitize: small and without Triton, to be run under compute-sanitizer")


@pytest.fixture
def device(cuda_device):
    with torch.cuda.device(cuda_device):
        yield cuda_device


@pytest.fixture(autouse=True)
def _memory_goes_back():
    """What a large test had, other processes on the GPU may need."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 4 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _only_listed_variants(monkeypatch):
    """Every variant that a test launches is one that specs.py exports, so that a machine without the DSL has it.

    On a GPU with another number of SMs planning chooses other variants, which are compiled there.
    """
    launcher, listed = op.launcher, set(specs.needed_specs())

    def checked(spec):
        if torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count == specs.SM_COUNT:
            assert spec in listed, f"{spec} is not in tests/gpu/specs.py"
        return launcher(spec)

    monkeypatch.setattr(op, "launcher", checked)
