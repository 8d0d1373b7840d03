"""A small language model of FLA's trained with our kernels and with FLA's: the losses go the same way."""

import fla.models  # noqa: F401  # all its kernels, before they are told not to tune
import pytest
import torch
import torch.nn.functional as F
from gpu import models
from gpu.launching import untuned

from fla_kda_backend import dispatch_log, register
from fla_kda_backend.cli import _models

pytestmark = pytest.mark.gpu
STEPS, BATCH, TOKENS, VOCABULARY = 300, 8, 256, 128
WINDOW = 20  # steps that a point of a curve is the mean of
PERTURBED = 3  # runs of FLA's from parameters that are off by one unit in the last place


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "1")
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    assert register()
    untuned(monkeypatch)


def batch(step, device):
    """Token ids [BATCH, TOKENS]: a fixed successor of the token before, or, one time in ten, any token."""
    generator = torch.Generator().manual_seed(step)
    successor = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    foretold = torch.rand(BATCH, TOKENS, generator=generator) < 0.9
    for t in range(1, TOKENS):
        ids[:, t] = torch.where(foretold[:, t], successor[ids[:, t - 1]], ids[:, t])
    return ids.to(device)


def built(name, device):
    """In bf16 as models.small, for training."""
    return _models.build(models.small_config(name), device).train()


def perturbed(model, seed):
    """Each bf16 parameter one unit in the last place up or down."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype == torch.bfloat16:
                bits = parameter.view(torch.int16)  # of 0 they would become NaN
                sign = 2 * torch.randint(2, bits.shape, generator=generator, device=bits.device, dtype=torch.int16) - 1
                bits += sign * (parameter != 0)
    return model


def train(model, steps=STEPS):
    """The loss of each step, [steps]; the optimiser has fp32 copies of the parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = [parameter.detach().float().clone() for parameter in parameters]
    optimiser, losses = torch.optim.AdamW(copies, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0), []
    for step in range(steps):
        ids = batch(step, model.device)
        logits = model(ids).logits.float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for copy, parameter in zip(copies, parameters):
            copy.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(copies, 1.0)
        optimiser.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, parameters):
                parameter.copy_(copy)
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def curve(losses):
    return losses.unfold(0, WINDOW, WINDOW).mean(1)


def distance(one, other):
    """Root mean square between two curves."""
    return (curve(one) - curve(other)).square().mean().sqrt().item()


@pytest.mark.parametrize("name", models.TRAINED)
def test_the_loss_goes_as_with_triton(name, device, record_property):
    with dispatch_log.capture() as seen:
        ours = train(built(name, device))
    layers = models.LAYERS[name]
    ran = [(record.outcome, record.kernel) for record in seen]
    assert len(ran) == 2 * layers * STEPS and set(ran) == {("accepted", "wy64"), ("accepted", "wy64_backward")}
    with _models.switched(False), dispatch_log.capture() as seen:
        theirs = train(built(name, device))
        others = [train(perturbed(built(name, device), seed)) for seed in range(PERTURBED)]
    assert not seen
    found, chance = distance(ours, theirs), [distance(other, theirs) for other in others]
    record_property("distances", {"ours": found, "perturbed": chance})
    print(f"\nlosses {theirs[0]:.2f} to {theirs[-WINDOW:].mean():.3f}, ours to {ours[-WINDOW:].mean():.3f}; "
          f"distance {found:.1e}, perturbed {' '.join(f'{x:.1e}' for x in chance)}")  # fmt: skip
    assert theirs[-WINDOW:].mean() < 0.7 * theirs[0], "nothing was learned"
    assert found <= max(chance)
