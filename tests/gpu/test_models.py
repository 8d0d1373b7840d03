"""FLA's own models, whole: logits beside those of FLA's Triton kernels, and which calls ran on ours."""

import fla.models  # noqa: F401  # all its kernels, before they are told not to tune
import pytest
import torch
from golden import relative_error
from gpu import models
from gpu.launching import untuned
from gpu.models import all_layers_here, here, on_triton, precisely, small, tokens

from fla_kda_backend import cli, register
from fla_kda_backend.cli import _models

pytestmark = pytest.mark.gpu
EVERY_MODEL = pytest.mark.parametrize("name", models.KINDS)

# Between the logits of two right implementations, which differ by about 2e-2: what comes between the layers is bf16 as well.
CLOSE = 6e-2


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "1")
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    assert register()
    untuned(monkeypatch)
    with torch.no_grad(), _models.attention():
        yield


def close(logits, others):
    """Whether logits [.., tokens, vocabulary] agree as a whole, and in each token to within a few times that."""
    assert logits.isfinite().all()
    worst = ((logits.double() - others.double()).norm(dim=-1) / others.double().norm(dim=-1)).max()
    return relative_error(logits, others) < CLOSE and worst < 10 * CLOSE


# ---- prefill -----------------------------------------------------------------------------------------------------------
@EVERY_MODEL
def test_logits_are_as_near_to_double_precision_as_tritons(name, device, monkeypatch, record_property):
    model = small(name, device)
    ids = tokens(model, 300, batch=2)
    reference = precisely(model, monkeypatch, ids).logits
    ours, theirs = here(model, ids).logits, on_triton(model, ids).logits
    errors = relative_error(ours, reference), relative_error(theirs, reference)
    record_property("errors", errors)
    print(f"\nlogits: ours {errors[0]:.1e}, Triton {errors[1]:.1e}")
    assert errors[0] <= 1.2 * errors[1]
    assert close(ours, theirs)


@pytest.mark.parametrize("name", ["kda", "kda-safe"])
def test_prefill_of_8192_tokens(name, device):
    model = small(name, device)
    ids = tokens(model, 8192)
    with all_layers_here(model) as seen:
        ours = model(ids, use_cache=True)
    assert all(dict(record.params)["replay"] for record in seen)
    theirs = on_triton(model, ids, use_cache=True)
    assert close(ours.logits, theirs.logits)
    for layer in _models.kda_layers(model):
        states = [output.past_key_values[layer]["recurrent_state"] for output in (ours, theirs)]
        assert states[0].shape == states[1].shape and states[0].dtype == states[1].dtype == torch.float32
        assert relative_error(*states) < CLOSE


def test_a_prefill_goes_on_from_its_cache(device):
    model = small("kda", device)
    ids = tokens(model, 300, batch=2)
    whole, first = here(model, ids), here(model, ids[:, :170], use_cache=True)
    second = here(model, ids[:, 170:], past_key_values=first.past_key_values)
    assert close(torch.cat([first.logits, second.logits], 1), whole.logits)


# ---- generate ----------------------------------------------------------------------------------------------------------
@EVERY_MODEL
def test_generate(name, device):
    """Greedy: each token is the best after those before it, by the Triton kernels too, up to how near the second is."""
    model = small(name, device)
    prompt = tokens(model, 100)
    with all_layers_here(model) as seen:  # a decoding step asks nobody
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False)
    assert all(record.shapes[0] == (1, 100, models.HEADS, 128) for record in seen)
    assert text.shape == (1, 164) and torch.equal(text[:, :100], prompt)
    logits = on_triton(model, text).logits[0, 99:-1].double()
    chosen = logits.gather(1, text[0, 100:, None])[:, 0]
    short = (logits.amax(1) - chosen) / logits.std()
    assert short.max() < 0.3 and short.mean() < 0.03  # of a token at random: more than 2


# ---- several sequences -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["kda", "hybrid"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(name, side, device):
    model = small(name, device)
    ids, lengths = tokens(model, 300, batch=3), (300, 170, 65)
    place = [slice(300 - length, 300) if side == "left" else slice(length) for length in lengths]
    mask = torch.zeros_like(ids)
    for row, where in zip(mask, place):
        row[where] = 1
    with all_layers_here(model) as seen:
        ours = model(ids, attention_mask=mask).logits
    assert all(record.num_sequences == 3 and record.shapes[0][:2] == (1, sum(lengths)) for record in seen)
    theirs = on_triton(model, ids, attention_mask=mask).logits
    assert close(ours[mask.bool()], theirs[mask.bool()])
    if (side, name) == ("right", "hybrid"):
        return  # FLA's attention layer takes positions from the right end of a row
    for row, where, found in zip(ids, place, ours):
        assert close(found[where], here(model, row[None, where]).logits[0])


@pytest.mark.parametrize("name", ["gva", "hybrid"])
def test_packed_sequences(name, device):
    model = small(name, device)
    ids, lengths = tokens(model, 300), [65, 170, 65]
    cu_seqlens = torch.tensor([0, 65, 235, 300], dtype=torch.int32, device=device)
    with all_layers_here(model) as seen:
        ours = model(ids, cu_seqlens=cu_seqlens).logits
    assert all(record.num_sequences == 3 for record in seen)
    alone = [here(model, each).logits for each in ids.split(lengths, 1)]
    assert close(ours, torch.cat(alone, 1))


# ---- the command line --------------------------------------------------------------------------------------------------
def test_demo_of_a_model(device, monkeypatch, capsys):
    small_one = models.small_config("kda")
    monkeypatch.setattr(_models, "config", lambda name: small_one)
    assert cli.main(["demo", "--model", "kda"]) == 0
    printed = capsys.readouterr().out
    assert "each of the 2 KDA layers ran on its kernels" in printed
    assert "prefill of the model" in printed and "x as long" in printed and "calls ran on kda_cute" in printed
