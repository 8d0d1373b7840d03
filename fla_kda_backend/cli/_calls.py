"""Calls of chunk_kda as models make them, on the meta device, and the compiled kernels that they run on.

The same rules and plans as for real calls decide which kernels these are.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ._config import LARGEST, Config, Unfit

if TYPE_CHECKING:
    from ..compiling import KernelSpec

# (number of sequences, tokens of each): one long prompt, several, a large batch, and prompts of one chunk. With any number of
# heads, these run under every schedule, and with every width of value columns, that planning has for it.
SEQUENCES = ((1, 8192), (2, 4096), (4, 2048), (8, 1024), (16, 2048), (32, 256), (64, 128), (128, 64))
STATES = ((False, True), (False, False), (True, True))  # (initial state, final state): prefill, scoring, a prompt's next part
TRAINING = ((False, False),)  # the same where gradients are needed
OFFSETS = (None, "int32", "int64")  # dtype of cu_seqlens; FLA's layers make int32 from a padding mask
LONGEST = 131072  # tokens of the longest prompt that --for takes into account, where the model's own limit is more


class Layer(NamedTuple):
    """What the calls of a KDA layer depend on."""

    heads: int
    value_heads: int
    dim: int
    value_dim: int
    flags: dict[str, Any]  # of chunk_kda, lower_bound among them
    dtype: str  # of activations
    gate_dtype: str
    beta_dtypes: tuple[str, ...]  # those that users of the layer may choose
    parameter_dtypes: tuple[str | None, ...]  # of A_log and dt_bias; None: the gate is computed outside


IN_KERNEL = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
USUAL = tuple(
    Layer(
        heads=heads,
        value_heads=heads,
        dim=128,
        value_dim=128,
        flags={**dict.fromkeys((*IN_KERNEL, "safe_gate", "state_v_first"), True), "lower_bound": -5.0},
        dtype="bfloat16",
        gate_dtype="bfloat16",
        beta_dtypes=("bfloat16",),
        parameter_dtypes=("float32",),
    )
    for heads in (8, 32)  # with both, a single long prompt runs under every schedule
)


def layer_of(path: str | Path) -> tuple[Layer, int]:
    """(Layer, longest prompt in tokens) of a config.json, or of a directory with one; raises _config.Unfit."""
    config = Config.read(path)
    dtype = config.dtype()
    longest = LONGEST
    for name in ("max_position_embeddings", "model_max_length"):
        if config.given(name):
            longest = int(min(LONGEST, config.number(name, above=0)))
            break
    if config.fields.get("model_type") == "kda":
        return _of_fla(config, dtype), max(1, longest)
    if "linear_attn_config" in config.fields or config.fields.get("model_type") in (
        "kimi_linear",
        "glm5_next",
        "bailing_hybrid",
    ):
        return _of_transformers(config, dtype), max(1, longest)
    raise config.unfit(
        "model_type",
        "names no model with KDA layers that is known here: --for takes FLA's kda models, Kimi Linear and its kin; "
        "without --for, what FLA's layer calls is compiled",
    )


def _of_fla(config: Config, dtype: str) -> Layer:
    """fla.layers.KimiDeltaAttention, with the defaults of fla.models.KDAConfig."""
    heads, dim = config.count("num_heads", 16), config.count("head_dim", 128)
    flags: dict[str, Any] = dict.fromkeys((*IN_KERNEL, "state_v_first"), True)
    for name in ("allow_neg_eigval", "safe_gate"):
        flags[name] = config.flag(name, False)
    flags["lower_bound"] = config.number("lower_bound") if config.given("lower_bound") else None
    value_heads = config.count("num_v_heads") if config.given("num_v_heads") else heads
    value_dim = int(dim * config.number("expand_v", 1, above=0, most=LARGEST))
    if value_dim < 1:
        raise config.unfit("expand_v", f"leaves no value column of head_dim {dim}: FLA's default is 1")
    # The layer makes its parameters in fp32; a model that was converted as a whole has them in its own dtype.
    parameters = tuple(dict.fromkeys(("float32", dtype)))
    return Layer(heads, value_heads, dim, value_dim, flags, dtype, dtype, (dtype,), parameters)


def _of_transformers(config: Config, dtype: str) -> Layer:
    """Kimi Linear and its kin in transformers, and Kimi's own code: gate and beta are computed outside, the gate in fp32."""
    own = config.inner("linear_attn_config")
    heads = _first(own, "num_heads", config, ("linear_num_heads", "num_attention_heads"))
    if heads is None:
        names = "linear_attn_config.num_heads, linear_num_heads or num_attention_heads"
        raise Unfit(f"{config.path}: has no number of heads: write {names}")
    dim = _first(own, "head_dim", config, ("linear_head_dim", "head_dim")) or 128
    flags = {"use_qk_l2norm_in_kernel": True}
    return Layer(heads, heads, dim, dim, flags, dtype, "float32", tuple(dict.fromkeys((dtype, "float32"))), (None,))


def _first(own: Config, name: str, config: Config, others: Sequence[str]) -> int | None:
    """The first number that is given: of the layer's own field, or of one of the model's."""
    for where, field in ((own, name), *((config, other) for other in others)):
        if where.given(field):
            return where.count(field)
    return None


def calls(
    layer: Layer,
    sequences: Iterable[tuple[int, int]] = SEQUENCES,
    states: Iterable[tuple[bool, bool]] = STATES,
) -> Iterator[dict[str, Any]]:
    """Keyword arguments of the prefills that the layer may be asked for."""
    kinds = itertools.product(sequences, states, OFFSETS, layer.beta_dtypes, layer.parameter_dtypes)
    for (number, tokens), (initial, final), offsets, beta, parameters in kinds:
        yield _call(layer, number, tokens, initial, final, offsets, beta, parameters)


def steps(layer: Layer, sequences: Iterable[tuple[int, int]] = SEQUENCES) -> Iterator[dict[str, Any]]:
    """The same of the forwards of training steps, with gradients of everything."""
    for call in calls(layer, sequences, TRAINING):
        for value in call.values():
            if getattr(value, "is_floating_point", bool)():
                value.requires_grad_()
        yield call


def _call(
    layer: Layer,
    number: int,
    tokens: int,
    initial: bool,
    final: bool,
    offsets: str | None,
    beta: str,
    parameters: str | None,
) -> dict[str, Any]:
    from ..testing.calls import Form, make, rows_of

    dtypes = {
        **dict.fromkeys(("q", "k", "v"), layer.dtype),
        "g": layer.gate_dtype,
        "beta": beta,
        **dict.fromkeys(("A_log", "dt_bias"), parameters),
        "initial_state": "float32" if initial else None,
        "cu_seqlens": offsets,
    }
    rows = rows_of((tokens,) * number, offsets is not None)
    form = Form(
        **rows,
        qk_heads=layer.heads,
        heads=layer.value_heads,
        dim=layer.dim,
        value_dim=layer.value_dim,
        dtypes={name: dtype for name, dtype in dtypes.items() if dtype is not None},
        flags={**layer.flags, "output_final_state": final},
    )
    return make(form, spelled_out=True)


def specs_of(
    arguments: Sequence[dict[str, Any]], arch: str, sm_count: int, modes: Sequence[str]
) -> tuple[dict["KernelSpec", None], dict[tuple[str, str], int]]:
    """(specs, refusals) of calls on an arch: {KernelSpec: None} in order, and {(code, message): how many calls}.

    Where a tensor requires grad, the kernels of the backward are among them.
    """
    from .. import eligibility, planning
    from ..backward_geometry import backward_geometry
    from ..call import parse
    from ..compiling import ARCHS
    from ..facts import Facts, differentiated
    from ..geometry import geometry

    capability = next(capability for capability, name in ARCHS.items() if name == arch)
    specs: dict[KernelSpec, None] = {}
    refusals: dict[tuple[str, str], int] = {}
    for call, mode in itertools.product([parse((), each) for each in arguments], modes):
        known = Facts(capability, sm_count, grad_enabled=True, inference_mode=False, mode=mode, untested=True)
        accepted, code, message = eligibility.check(call, known)
        if not accepted:
            refusals[code, message] = refusals.get((code, message), 0) + 1
            continue
        sizes, wanted = geometry(call, planning.plan(call, known), arch), differentiated(call, known)
        needed = (sizes.spec, *(backward_geometry(call, sizes, wanted).specs if wanted else ()))
        specs |= dict.fromkeys(spec for spec in needed if spec is not None)
    return specs, refusals
