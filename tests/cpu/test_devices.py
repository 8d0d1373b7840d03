"""Several GPUs in one process, with made-up device indices: the tensors' device decides, not the current one."""

import contextlib
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fla_kda_backend import facts, op, planning
from fla_kda_backend.call import parse

GPUS = {0: ((10, 0), 148), 1: ((9, 0), 132), 2: ((9, 0), 114)}


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs, of which the first is current. .entered are devices made current, .launched (current, spec, arguments)."""
    gpus = types.SimpleNamespace(current=0, entered=[], launched=[])

    @contextlib.contextmanager
    def device(chosen):
        before, gpus.current = gpus.current, torch.device(chosen).index
        gpus.entered.append(gpus.current)
        yield
        gpus.current = before

    def properties(chosen):
        (major, minor), count = GPUS[getattr(chosen, "index", chosen)]
        return types.SimpleNamespace(major=major, minor=minor, multi_processor_count=count)

    monkeypatch.setattr(op, "_empty_strided_cuda", None)  # it knows nothing of fake tensors
    monkeypatch.setattr(facts, "_devices", {})
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda chosen: GPUS[torch.device(chosen).index][0])
    monkeypatch.setattr(op, "LOWEST_ADDRESS", 0)  # fake tensors have no memory, so no address
    monkeypatch.setattr(op, "_current_device", lambda: gpus.current)
    monkeypatch.setattr(op, "_stream_handle", lambda index: 100 + index)
    monkeypatch.setattr(op, "launcher", lambda spec: lambda *arguments: gpus.launched.append((gpus.current, spec, arguments)))
    return gpus


def prefill(index):
    """A prefill on a GPU of that index, without memory behind it."""
    wide = [torch.empty(1, 100, 2, 128, dtype=torch.bfloat16, device=f"cuda:{index}") for _ in range(4)]
    return parse((*wide, torch.empty(1, 100, 2, dtype=torch.bfloat16, device=f"cuda:{index}")), {
        "A_log": torch.empty(2, device=f"cuda:{index}"), "dt_bias": torch.empty(256, device=f"cuda:{index}"),
        "lower_bound": -5.0, "output_final_state": True,
        **dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first"), True),
    })  # fmt: skip


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_tensors_device_decides(gpus):
    with FakeTensorMode(), torch.no_grad():
        for index in (1, 0, 2, 1):
            call = prefill(index)
            known = facts.gather(call)
            assert (known.capability, known.sm_count) == GPUS[index]
            out, state = op.run(call, planning.plan(call, known))
            assert out.device.index == state.device.index == index
    assert [current for current, _, _ in gpus.launched] == [1, 0, 2, 1]
    assert [spec.arch for _, spec, _ in gpus.launched] == ["sm_90a", "sm_100a", "sm_90a", "sm_90a"]
    assert [getattr(spec.schedule, "max_ctas", None) for _, spec, _ in gpus.launched] == [132, None, 114, 132]
    assert [arguments[-1] for _, _, arguments in gpus.launched] == [101, 100, 102, 101]
    assert gpus.entered == [1, 2, 1] and gpus.current == 0  # and nothing is done where it is current already
