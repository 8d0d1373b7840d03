"""Tensors without plain memory, on a GPU: FLA's own answer or error comes back, and the CUDA context lives on."""

import pytest
import torch
from fla.ops.kda import chunk_kda
from golden import relative_error
from kda_inputs import chunk_kda_arguments, random_inputs

from fla_kda_backend import dispatch_log, op
from fla_kda_backend import register as register_backend

pytestmark = pytest.mark.gpu
HEADS = 2  # FLA tunes its kernels anew for every number of heads


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    assert register_backend()
    with torch.no_grad():
        yield


@pytest.fixture
def arguments(device):
    """Of a call that has run here four times, so that its verdict is the recent one, and its bits."""
    given = chunk_kda_arguments(random_inputs(256, HEADS, device=device))
    expected = [chunk_kda(**given) for _ in range(4)][-1]
    yield given
    with dispatch_log.capture() as seen:
        found = chunk_kda(**given)
    torch.cuda.synchronize()  # an illegal memory access of the test would raise here
    assert [record.outcome for record in seen] == ["accepted"]
    assert all(map(torch.equal, found, expected))


def declined(function):
    """The codes of the calls in function(), which may raise whatever FLA raises."""
    with dispatch_log.capture() as seen:
        try:
            function()
        except Exception as error:
            assert "CUDA error" not in str(error)
    torch.cuda.synchronize()
    assert not any(record.outcome == "accepted" for record in seen)
    return [record.code for record in seen]


@pytest.mark.parametrize("captured", [False, True], ids=["its own tensor", "tensors from outside"])
def test_functionalize(arguments, captured):
    def model(q):
        return chunk_kda(**arguments if captured else arguments | {"q": q})[0]

    assert declined(lambda: torch.func.functionalize(model)(arguments["q"])) == ["intercepted"]


def test_vmap(arguments):
    def model(q):
        return chunk_kda(**arguments | {"q": q})[0]

    assert declined(lambda: torch.vmap(model)(arguments["q"].expand(3, *arguments["q"].shape))) == ["intercepted"]


def test_the_negative_bit(arguments):
    z = torch.randn(arguments["beta"].shape, dtype=torch.complex64, device=arguments["q"].device)
    beta = z.conj().imag
    plain = torch.view_as_real(z)[..., 1].neg()
    assert torch.equal(beta, plain) and beta.is_neg()
    for _ in range(4):
        expected = chunk_kda(**arguments | {"beta": plain})
    with dispatch_log.capture() as seen:
        found = chunk_kda(**arguments | {"beta": beta})
    assert [record.code for record in seen] == ["memory"]
    assert all(relative_error(a, b) < 2e-2 for a, b in zip(found, expected))


@pytest.mark.parametrize("offset", [0, 64])
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_a_freed_storage_of_parameters(arguments, name, offset):
    """FSDP frees them so. Only what reaches no kernel of torch's is asked for: FLA may launch on the others."""
    flat = torch.zeros(arguments[name].numel() + offset, dtype=arguments[name].dtype, device=arguments[name].device)
    view = flat[offset:].view(arguments[name].shape)
    flat.untyped_storage().resize_(0)
    launch = op.Launch  # FLA's kernels would read the address 0
    from fla_kda_backend import backend

    given = arguments | {name: view}
    verdict = backend.decide((), given, *backend.identity((), given))
    assert verdict.accepted and isinstance(verdict.launch, launch)  # metadata tell nothing
    with pytest.raises(RuntimeError, match="memory was freed"):
        verdict.launch(*verdict.tensors([*given.values(), None]))
