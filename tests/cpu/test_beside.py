"""The local gradients beside the chains: which chunk comes when, and what the chains count; the kernels' own arithmetic."""

import types
from dataclasses import replace

import pytest
from calls import H200, prefill

from fla_kda_backend import planning
from fla_kda_backend.call import parse
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.kernels.wy64.backward import order
from fla_kda_backend.kernels.wy64.backward.contract import Schedule

PLAIN = Variant(final_state=None)
PACKED = replace(PLAIN, cu_seqlens="int32")


@pytest.mark.parametrize("chunks", [*range(1, 40), 128, 333])
def test_chunks_go_in_the_order_in_which_both_chains_have_been_there(chunks):
    turns = [order.chunk_of_turn(turn, chunks) for turn in range(chunks)]
    assert sorted(turns) == list(range(chunks))
    ready = [max(order.STATES_LINK * (n + 1), order.REVERSE_LINK * (chunks - n)) for n in turns]
    latest = max(order.STATES_LINK, order.REVERSE_LINK)
    assert all(one <= other + 2 * latest for one, other in zip(ready, ready[1:]))


@pytest.mark.parametrize("links", [0, 1, 2, 3, 4, 5, 6, 7, 8, 31, 128])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("step", [16, -16])
def test_each_link_is_counted_once_after_its_stores(links, every, step, monkeypatch):
    workspace = pytest.importorskip("fla_kda_backend.kernels.wy64.backward.workspace")
    closed, complete, counted = 0, 0, []

    def wait_but(count):
        nonlocal complete
        complete = max(complete, closed - count)

    def publish(ready, step, begin, end):
        assert end <= complete
        counted.extend(ready + link * step for link in range(begin, end))

    monkeypatch.setattr(workspace, "publish", publish)
    monkeypatch.setattr(workspace, "PUBLISH_EVERY", every)
    monkeypatch.setattr(workspace, "Int32", int)
    monkeypatch.setattr(workspace, "cutlass", types.SimpleNamespace(max=max))
    monkeypatch.setattr(workspace, "ptx", types.SimpleNamespace(bulk_wait=lambda: wait_but(0)))
    for link in range(links):
        closed += 1
        workspace.publish_at.__wrapped__(link, 1000, step, lambda: wait_but(2))
    workspace.publish_rest.__wrapped__(links, 1000, step)
    assert counted == [1000 + link * step for link in range(links)]


@pytest.mark.parametrize("tokens, sequences, heads, variant, beside", [
    (8192, 1, 6, PLAIN, True), (8192, 1, 6, PACKED, True), (8192, 1, 96, PLAIN, False), (1024, 1, 6, PLAIN, False),
    (8192, 2, 4, PLAIN, True), (8192, 2, 4, PACKED, False), (0, 1, 6, PLAIN, False), (8192, 0, 6, PACKED, False),
])  # fmt: skip
def test_few_long_chains_have_the_local_gradients_beside_them(tokens, sequences, heads, variant, beside):
    assert planning.beside_chains(tokens, sequences, heads, 132, variant) == beside


def test_never_in_segments():
    assert not Schedule(beside=True).in_segments().beside
    with pytest.raises(ValueError, match="beside=True needs segmented=False"):
        Schedule(beside=True, segmented=True).check(PLAIN)


def test_the_plan_of_a_backward_says_so():
    call = parse((), prefill(1, 8192, 6))
    assert planning.backward(call, planning.plan(call, H200), ("q",)).params["beside"]
    many = parse((), prefill(1, 8192, 96))
    assert "beside" not in planning.backward(many, planning.plan(many, H200), ("q",)).params
