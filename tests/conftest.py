"""Fixtures shared by all tests. Nothing here touches a GPU, or asks for one, until a test does."""

import sys

import pytest
import torch


@pytest.fixture(scope="session")
def cuda_device():
    """The first GPU that the kernels run on; the test is skipped where there is none."""
    for index in range(torch.cuda.device_count()):
        if torch.version.hip is None and torch.cuda.get_device_capability(index) == (9, 0):
            return torch.device("cuda", index)
    pytest.skip("needs a GPU of compute capability 9.0")


@pytest.fixture(autouse=True)
def _skip_gpu_tests_elsewhere(request):
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("cuda_device")


@pytest.fixture(autouse=True)
def _nothing_remembered():
    """Tests replace what verdicts come from; none is to meet those of another."""
    from fla_kda_backend import memo

    def forget():
        memo.clear()
        for module in ("backend", "selfcheck"):
            if (loaded := sys.modules.get(f"fla_kda_backend.{module}")) is not None:
                loaded._failures.clear()

    forget()
    yield
    forget()


@pytest.fixture(autouse=True)
def _default_switches(monkeypatch):
    """Tests set the switches that they mean; those of the shell do not count."""
    from fla_kda_backend import config

    for variable in config.VARIABLES:
        if variable is not config.CACHE_DIR:
            monkeypatch.delenv(variable.name, raising=False)
