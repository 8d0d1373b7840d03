"""Inputs, outputs and workspaces that FlashKDA computed on an H200, from tests/data (its README tells the format)."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch

from fla_kda_backend.reference import exact

DATA = Path(__file__).parent / "data"
STRONG = (
    "plain fp32_state bf16_state_tail varlen varlen_final_only batched_tail initial_only lower_bound_1 saturated"
    " zero_rows large_values long correlated_keys"
).split()
SLOW = "slow_fixed slow_varlen_state slow_tail_bf16 slow_multihead slow_no_state_in slow_long".split()
CASES = STRONG + SLOW
WITH_WORKSPACE = "plain fp32_state bf16_state_tail varlen saturated slow_fixed".split()
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


@dataclass
class Golden:
    batch: int
    tokens: int
    heads: int
    inputs: dict  # the arguments of exact.forward
    out: torch.Tensor  # [B, T, H, V] bf16
    final_state: torch.Tensor | None  # [N, H, V, K], dtype of the call's final state
    workspace: dict = field(default_factory=dict)  # [H, C, ...], or empty where the case has none

    def comparable(self, name, array):
        """The entries of a workspace array [H, C, ...] or [H * C, ...] that the inputs define, as [H, rows, ...]."""
        rows = exact.comparable_rows(name, self.batch, self.tokens, self.inputs["cu_seqlens"])
        array = array if array.shape[0] == self.heads else array.unflatten(0, (self.heads, -1))
        return array[:, rows.to(array.device)]


@cache
def archive(slow):
    return np.load(DATA / ("flashkda_sm90_slow.npz" if slow else "flashkda_sm90.npz"))


def load(name, device="cpu"):
    stored = archive(name in SLOW)
    arrays = {key.split("/")[1]: stored[key] for key in stored.files if key.startswith(name + "/")}
    meta = json.loads(str(arrays.pop("meta")))
    tensors = {key: tensor_of(array).to(device) for key, array in arrays.items()}
    inputs = {key: tensors.get(key) for key in INPUTS}
    inputs.update(scale=meta["scale"], lower_bound=meta["lower_bound"])
    bounds = exact.sequence_bounds(meta["B"], meta["T"], inputs["cu_seqlens"])
    chunks = exact.chunk_rows(bounds)[2][-1]
    workspace = {}
    if "ws_k_start" in tensors:  # beyond the last chunk each head has unused memory
        workspace = {key: tensors[f"ws_{key}"].unflatten(0, (meta["H"], -1))[:, :chunks] for key in exact.WORKSPACE}
    return Golden(meta["B"], meta["T"], meta["H"], inputs, tensors["out"], tensors.get("final_state"), workspace)


def tensor_of(array):
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def relative_error(value, reference):
    value, reference = value.double(), reference.double()
    return ((value - reference).norm() / reference.norm()).item()
