"""Small FLA models, run on our kernels, on FLA's Triton kernels, and in double precision where chunk_kda is called."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from fla_kda_backend import dispatch_log
from fla_kda_backend.cli import _models
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.reference import gold

HEADS = 2  # FLA tunes its kernels again for every number of heads
HIDDEN = 256
LAYERS = {"kda": 2, "kda-safe": 2, "gva": 2, "hybrid": 4}

# What the layers' calls launch. A_log and dt_bias are fp32 as from_pretrained leaves them; model.bfloat16() makes them bf16.
SOFTPLUS = Variant(gate="softplus")
BOUNDED = Variant()
BFLOAT16 = replace(SOFTPLUS, a_log="bf16", dt_bias="bf16")
KINDS = {"kda": SOFTPLUS, "kda-safe": BOUNDED, "gva": BFLOAT16, "hybrid": SOFTPLUS}
TRAINED = ("kda", "kda-safe")  # in test_training_run.py
VARIANTS = (  # setting of specs.py, kind
    *(("wy64", kind) for kind in (SOFTPLUS, BOUNDED, BFLOAT16)),
    # generate, with a mask, and padded batches
    *(("wy64", replace(kind, cu_seqlens="int32")) for kind in (SOFTPLUS, BOUNDED, BFLOAT16)),
    # a prefill that goes on
    ("wy64", replace(SOFTPLUS, initial_state="fp32")),
    # thousands of tokens
    *(("wy64 overlap replay", kind) for kind in (SOFTPLUS, BOUNDED)),
)


def small_config(name, **others):
    """A narrow model; weights so large that every layer counts in the logits, and no token that ends a sequence."""
    sizes = {"layers": LAYERS[name], "heads": HEADS, "hidden": HIDDEN, "vocab_size": 128}
    return _models.config(name, **sizes, initializer_range=HIDDEN**-0.5, eos_token_id=None, **others)


@cache
def small(name, device):
    model = _models.build(small_config(name), device)
    model.register_forward_pre_hook(_with_its_cache, with_kwargs=True)
    return model.bfloat16() if KINDS[name].a_log == "bf16" else model


def _with_its_cache(model, args, kwargs):
    """generate of transformers 5.24 calls the cache `cache`, a name that FLA 0.6 ignores: it would decode without a state."""
    if "cache" in kwargs:
        kwargs["past_key_values"] = kwargs.pop("cache")
    return args, kwargs


def tokens(model, length, batch=1):
    return _models.random_tokens(model.config, model.device, batch, length)


# ---- who computes ------------------------------------------------------------------------------------------------------
@contextmanager
def all_layers_here(model, kernel="wy64"):
    """The block must have each KDA layer ask us once, and each call run on our kernels; gives the log's records."""
    with dispatch_log.capture() as seen:
        yield seen
    ran = [(record.outcome, record.kernel) for record in seen]
    assert ran == [(dispatch_log.ACCEPTED, kernel)] * len(_models.kda_layers(model))


def here(model, *args, **kwargs):
    """The model's output with every KDA layer on our kernels."""
    with all_layers_here(model):
        return model(*args, **kwargs)


def on_triton(model, *args, **kwargs):
    with _models.switched(False), dispatch_log.capture() as seen:
        output = model(*args, **kwargs)
    assert not seen
    return output


def precisely(model, monkeypatch, *args, **kwargs):
    """The model's output where chunk_kda alone is computed in double precision, from the same bf16 and rounded to it."""
    from fla.layers import kda

    calls = []

    def chunk_kda(**arguments):
        calls.append(arguments)
        out, final_state = gold.forward(**arguments)
        return out.to(arguments["v"].dtype), final_state.float() if arguments["output_final_state"] else None

    with monkeypatch.context() as patched, dispatch_log.capture() as seen:
        patched.setattr(kda, "chunk_kda", chunk_kda)
        output = model(*args, **kwargs)
    assert not seen and len(calls) == len(_models.kda_layers(model))
    return output
