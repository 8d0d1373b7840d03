"""FLA's own KDA models with random weights: what the demo runs, and what whole-model benchmarks and tests run."""

import copy
import os
from contextlib import contextmanager, suppress
from unittest import mock

MODELS = {
    "kda": "FLA's default configuration: softplus gate",
    "kda-safe": "safe_gate with lower_bound -5",
    "gva": "two value heads for each head of q and k",
    "hybrid": "one layer in four is attention",
}


def config(name, layers=4, heads=16, hidden=2048, **others):
    """The KDAConfig of one of MODELS; `others` are more of KDAConfig's arguments, which has FLA's default for the rest."""
    from fla.models import KDAConfig

    own = {
        "kda": {},
        "kda-safe": {"safe_gate": True, "lower_bound": -5.0},
        "gva": {"num_v_heads": 2 * heads},
        "hybrid": {"attn": {"layers": list(range(layers))[2::4], "num_heads": hidden // 128}},
    }[name]
    return KDAConfig(num_hidden_layers=layers, num_heads=heads, hidden_size=hidden, **own, **others)


def build(config, device, seed=0):
    """The KDAForCausalLM of a config: bf16, but A_log and dt_bias fp32, as from_pretrained(dtype=torch.bfloat16) gives it."""
    import fla.models  # noqa: F401  # makes it known to transformers
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_tokens(config, device, batch=1, tokens=8192, seed=0):
    """Token ids [batch, tokens]."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, tokens), device=device, generator=generator)


def kda_layers(model):
    """Numbers of the layers that call chunk_kda."""
    from fla.layers.kda import KimiDeltaAttention

    return [number for number, block in enumerate(model.model.layers) if isinstance(block.attn, KimiDeltaAttention)]


def layer_calls(config, tokens):
    """{layer: keyword arguments of chunk_kda} of a prefill with a cache, as the layers' own code passes them.

    Shapes and dtypes alone, on the meta device: the layers run up to the call, without their short convolutions, which keep
    both and which no other device than a GPU has.
    """
    import torch
    from fla.layers import kda

    class Asked(Exception):
        """Ends a layer at its call."""

    def ask(**arguments):
        calls[number] = arguments
        raise Asked

    calls, config = {}, copy.deepcopy(config)
    config.use_short_conv = False
    model = build(config, "meta")
    hidden_states = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, device="meta")
    with mock.patch.object(kda, "chunk_kda", ask), torch.no_grad():
        for number in kda_layers(model):
            with suppress(Asked):
                model.model.layers[number].attn(hidden_states, use_cache=True)
    return calls


@contextmanager
def switched(on):
    """FLA asks this backend, or does not."""
    from .. import config

    name = config.ENABLED.name
    before = os.environ.get(name)
    os.environ[name] = "1" if on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# ---- attention of hybrid models ----------------------------------------------------------------------------------------
@contextmanager
def attention():
    """Lets FLA's attention layer run where the package flash_attn, which it requires, is missing: by torch's own attention."""
    from fla.layers import attn

    if attn.flash_attn_func is not None:
        yield
        return
    with mock.patch.multiple(attn, create=True, flash_attn_func=causal_attention, flash_attn_varlen_func=packed_attention):
        yield


def causal_attention(q, k, v, **options):
    """flash_attn_func: q [B, T, H, D], k and v [B, S, HK, D], the last tokens of both at the same time -> [B, T, H, D].

    options: causal=True, and a window_size that leaves everything in sight.
    """
    import torch

    queries, keys = q.shape[1], k.shape[1]
    seen = None if queries == keys else torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, is_causal=seen is None, enable_gqa=True
    )
    return out.transpose(1, 2)


def packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    """flash_attn_varlen_func: the same for sequences behind each other in q [tokens, H, D], k and v [keys, HK, D]."""
    import torch

    lengths = [offsets.diff().tolist() for offsets in (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)]
    sequences = zip(*(x[None].split(each, dim=1) for x, each in zip((q, k, v), lengths)))
    return torch.cat([causal_attention(*each)[0] for each in sequences])
