"""FLA's own KDA models with random weights, for the demo and for benchmarks and tests of whole models."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

MODELS = {
    "kda": "FLA's default configuration: softplus gate",
    "kda-safe": "safe_gate with lower_bound -5",
    "gva": "two value heads for each head of q and k",
    "hybrid": "one layer in four is attention",
}


def config(name: str, layers: int = 4, heads: int = 16, hidden: int = 2048, **others: Any) -> Any:
    """The KDAConfig of one of MODELS; `others` are more arguments of KDAConfig, and the rest have FLA's defaults."""
    from fla.models import KDAConfig

    changes: dict[str, dict[str, Any]] = {
        "kda": {},
        "kda-safe": {"safe_gate": True, "lower_bound": -5.0},
        "gva": {"num_v_heads": 2 * heads},
        "hybrid": {"attn": {"layers": list(range(layers))[2::4], "num_heads": hidden // 128}},
    }
    return KDAConfig(num_hidden_layers=layers, num_heads=heads, hidden_size=hidden, **changes[name], **others)


def build(config: Any, device: "torch.device | str", seed: int = 0) -> Any:
    """The KDAForCausalLM of a config: bf16, but A_log and dt_bias fp32, as from_pretrained(dtype=torch.bfloat16) makes it."""
    import fla.models  # noqa: F401  # registers the model with transformers
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_tokens(
    config: Any, device: "torch.device | str", batch: int = 1, tokens: int = 8192, seed: int = 0
) -> "torch.Tensor":
    """Token ids [batch, tokens]."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, tokens), device=device, generator=generator)


def kda_layers(model: Any) -> list[int]:
    """The indices of the layers that call chunk_kda."""
    from fla.layers.kda import KimiDeltaAttention

    return [number for number, block in enumerate(model.model.layers) if isinstance(block.attn, KimiDeltaAttention)]


def layer_calls(config: Any, tokens: int) -> dict[int, dict[str, Any]]:
    """{layer: keyword arguments of chunk_kda} of a prefill with a cache, as the layers' own code passes them.

    The tensors are on the meta device: the layers run up to the call. They run without their short convolutions, which change
    neither shape nor dtype and which only a GPU can run.
    """
    import torch
    from fla.layers import kda

    class Asked(Exception):
        """Ends a layer at its call."""

    def ask(**arguments: Any) -> None:
        calls[number] = arguments
        raise Asked

    calls: dict[int, dict[str, Any]] = {}
    config = copy.deepcopy(config)
    config.use_short_conv = False
    model = build(config, "meta")
    hidden_states = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, device="meta")
    with mock.patch.object(kda, "chunk_kda", ask), torch.no_grad():
        for number in kda_layers(model):
            with suppress(Asked):
                model.model.layers[number].attn(hidden_states, use_cache=True)
    return calls


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Within it, FLA asks this backend, or does not."""
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
def attention() -> Iterator[None]:
    """Within it, FLA's attention layer runs also without the package flash_attn: then on torch's own attention."""
    from fla.layers import attn

    if attn.flash_attn_func is not None:
        yield
        return
    with mock.patch.multiple(attn, create=True, flash_attn_func=causal_attention, flash_attn_varlen_func=packed_attention):
        yield


def causal_attention(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", **options: Any) -> "torch.Tensor":
    """flash_attn_func: q [B, T, H, D], k and v [B, S, HK, D] -> [B, T, H, D]; the last query sees the last key.

    options: causal=True, and a window_size that hides nothing; neither is looked at.
    """
    import torch

    queries, keys = q.shape[1], k.shape[1]
    seen = None if queries == keys else torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True).transpose(1, 2)


def packed_attention(
    q: "torch.Tensor",
    k: "torch.Tensor",
    v: "torch.Tensor",
    cu_seqlens_q: "torch.Tensor",
    cu_seqlens_k: "torch.Tensor",
    **options: Any,
) -> "torch.Tensor":
    """flash_attn_varlen_func: the same for sequences one after the other in q [tokens, H, D], k and v [keys, HK, D]."""
    import torch

    lengths = [offsets.diff().tolist() for offsets in (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)]
    sequences = zip(*(x[None].split(each, dim=1) for x, each in zip((q, k, v), lengths)))
    return torch.cat([causal_attention(*each)[0] for each in sequences])
