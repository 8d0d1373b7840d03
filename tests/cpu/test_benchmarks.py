"""The benchmarks' cases, lists of kernels, checks and tables; nothing here times anything or needs a GPU."""

import contextlib
import dataclasses
import math
import time
import types

import pytest
import torch

from benchmarks import bench, cases, checks, experiments, export, profile, report, results, schedules, specs
from benchmarks.implementations import IMPLEMENTATIONS, Implementation
from fla_kda_backend import dispatch_log, eligibility, planning
from fla_kda_backend.call import parse
from fla_kda_backend.reference import gold

MANGLED = "kernel_cutlass_kernel_fla_kda_backendkernels"
PREPARE = f"{MANGLED}column_splitpreparePrepareChunk16_object_at__0"
RECURRENCE = f"{MANGLED}column_splitrecurrenceRecurrenceSplit_object_at__1"
PREPARE64 = f"{MANGLED}wy64preparekernelPrepareWY64_object_at__CopyAtom_ThrID10_0"
CHAIN64 = f"{MANGLED}wy64chainkernelChainWY64_object_at__1"
REPLAY64 = f"{MANGLED}wy64chainreplayChainReplayWY64_object_at__1"
TRITON = "chunk_kda_fwd_kernel_inter_solve_fused"
SMALL = cases.Case("small", (40, 24), 2, True, 100)
RUN = dict.fromkeys(("gpu", "driver", "torch", "triton", "fla", "dsl", "version"), "x")


def wanted_decay(call):
    return gold.log_decay(call["g"].double(), call["A_log"], call["dt_bias"], call["lower_bound"])


# ---- cases ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("gate", "middle"), [("strong", cases.STRONG), ("weak", cases.WEAK)])
def test_even_gates_decay_as_they_say(gate, middle):
    decay = wanted_decay(cases.inputs(SMALL, gate, device="cpu")) / middle
    assert decay.mean() == pytest.approx(1, abs=0.02)
    # bf16 g is coarse where the sigmoid is small
    assert 1 - cases.JITTER - 0.04 < decay.min() and decay.max() < 1 + cases.JITTER + 0.04


def test_mixed_gate_is_log_uniform_over_channels():
    rates = -wanted_decay(cases.inputs(SMALL, "mixed", device="cpu")).mean((0, 1)).flatten()
    assert 0.001 < rates.min() < 0.0015 and 2 < rates.max() < 3
    quartiles = torch.quantile(rates.log(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    expected = [math.log(0.001) + share * math.log(3000) for share in (0.25, 0.5, 0.75)]
    assert quartiles.tolist() == pytest.approx(expected, abs=0.8)


def test_inputs_are_seeded_and_sets_differ():
    first, again = (cases.inputs(SMALL, device="cpu", initial_state=True) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first if isinstance(first[name], torch.Tensor))
    assert first["initial_state"].shape == (2, 2, 128, 128) and first["cu_seqlens"].tolist() == [0, 40, 64]
    small = dataclasses.replace(SMALL, lengths=(12000, 12000))
    one, *others = cases.input_sets(small, "mixed", device="meta")
    assert len(others) == 3 and all(other["cu_seqlens"] is one["cu_seqlens"] for other in others)
    assert not torch.equal(first["q"], cases.inputs(SMALL, seed=1, device="cpu")["q"])


def test_few_heads_are_those_heads():
    call = cases.inputs(SMALL, device="cpu", initial_state=True)
    whole, few = gold.forward(**call), gold.forward(**cases.few_heads(call, [1]))
    torch.testing.assert_close(few[0], whole[0][:, :, [1]])
    torch.testing.assert_close(few[1], whole[1][:, [1]])


@pytest.mark.parametrize("call, group", [("kimi", 1), ("softplus", 1), ("softplus", 2)])
def test_calls_of_other_models_decay_alike(call, group):
    case = dataclasses.replace(SMALL, heads=4, call=call, group=group)
    arguments = cases.inputs(case, "strong", device="cpu")
    decay = arguments["g"].double() if call == "kimi" else wanted_decay(arguments | {"lower_bound": None})
    assert 1 - cases.JITTER - 0.04 < (decay / cases.STRONG).min() and (decay / cases.STRONG).max() < 1 + cases.JITTER + 0.04
    variant = planning.plan(parse((), arguments), specs.H200).variant
    expected = {
        "kimi": {"gate": "given", "gate_dtype": "fp32", "a_log": None, "dt_bias": None, "beta": "given", "beta_dtype": "fp32",
                 "state_v_first": False},
        "softplus": {"gate": "softplus"},
    }[call]  # fmt: skip
    assert variant.changes == expected
    assert arguments["q"].shape[2] * group == arguments["v"].shape[2] == 4
    whole, few = gold.forward(**arguments), gold.forward(**cases.few_heads(arguments, [1, 2]))
    assert torch.equal(few[0], whole[0][:, :, [1, 2]]) and torch.equal(few[1], whole[1][:, [1, 2]])


def test_who_runs_flashkdas_call_alone():
    taken = {name: [case.call for case in cases.CASES.values() if item.takes(case)] for name, item in IMPLEMENTATIONS.items()}
    assert {name for name, calls in taken.items() if {*calls} == {"flashkda"}} == {"exact", "flashkda"}
    assert {*taken["triton"]} == {*taken["auto"]} == {*cases.CALLS}


@pytest.mark.parametrize("name", cases.CASES)
def test_the_rules_accept_every_case(name):
    case = cases.CASES[name]
    call = parse((), cases.inputs(case, device="meta"))
    assert eligibility.check(call, specs.H200).accepted
    assert (call.num_sequences, call.heads, call.tokens) == (case.sequences, case.heads, case.tokens)
    assert case.tokens in (8192, 65536)


# ---- compiled kernels -------------------------------------------------------------------------------------------------
def test_every_benchmark_lists_kernels_that_exist():
    parts = (bench.needed_specs(), experiments.needed_specs(), schedules.needed_specs())
    for needed in parts:
        assert needed and len(set(needed)) == len(needed)
        assert all(spec.arch == "sm_90a" for spec in needed)
    assert set(export.needed_specs()) == set().union(*parts)


def test_the_variants_that_auto_chooses_are_listed():
    listed = [spec for spec in bench.needed_specs() if spec.family == "wy64"]
    found = {(spec.schedule.replay, spec.variant.cu_seqlens) for spec in listed}
    assert found == {(True, None), (False, None), (False, "int64")}
    assert all((spec.variant.initial_state, spec.variant.final_state) == (None, "fp32") for spec in listed)
    assert not any(spec.schedule.segmented for spec in listed)


def test_listed_kernels_are_valid():
    pytest.importorskip("cutlass")
    from importlib import import_module

    from fla_kda_backend.kernels.families import FAMILIES

    for spec in export.needed_specs():
        module, name = FAMILIES[spec.family].kernel
        kernel = getattr(import_module(module), name)(spec.variant, spec.schedule)
        assert all(size + 1024 <= 228 << 10 for size in kernel.smem_bytes().values()), spec


def test_a_listed_kernel_is_the_plans():
    call = cases.inputs(cases.CASES["varlen6-H12"], device="meta")
    (spec,) = specs.of_mode(call, "exact")
    plan = planning.plan(parse((), call), specs.H200._replace(mode="exact"))
    assert (spec.family, spec.variant, spec.schedule) == (plan.kernel, plan.variant, plan.schedule)
    assert (spec.variant.cu_seqlens, spec.variant.final_state) == ("int64", "fp32")


def test_schedules_know_what_planning_chooses():
    chosen = {tokens: [schedules.planned(heads, tokens, 132) for heads in (6, 12, 13, 96)] for tokens in (8192, 1024)}
    assert chosen == {8192: ["both", "both", "overlap", "overlap"], 1024: ["plain"] * 4}
    for heads in schedules.HEADS:
        assert schedules.planned(heads, 8192, 132) in schedules.schedules_of(heads)


def test_schedules_need_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        schedules.main(["--heads", "6,12", "--tokens", "2048"])


def test_experiments_cover_what_was_published():
    shapes = {(e.bv, e.warps) for e in experiments.EXPERIMENTS}
    assert shapes == {(bv, warps) for bv in (32, 64, 128) for warps in (4, 8, 16) if bv // warps >= 8}
    assert {e.stages for e in experiments.EXPERIMENTS} == set(range(3, 9))
    assert {e.ctas_of_sm * e.warps for e in experiments.EXPERIMENTS if e.bv < 128} == {4, 8, 12, 16}


# ---- checks -----------------------------------------------------------------------------------------------------------
WY64 = (("max_ctas", 132), ("replay", False), ("grid", 24))
WY64_REPLAY = (("max_ctas", 132), ("replay", True), ("grid", 132))


def record(outcome="accepted", code="ok", kernel="column_split", params=(("bv", 32), ("grid", 24))):
    nothing = (None,) * len(dispatch_log.TENSORS)
    return dispatch_log.Record(0.0, outcome, code, "because", kernel, params, 1, None, nothing, nothing, ())


@pytest.mark.parametrize(
    ("name", "seen", "kernels", "wrong"),
    [
        ("exact", record(), [PREPARE, RECURRENCE], None),
        ("exact", record(), [PREPARE], "RecurrenceSplit did not run"),
        ("exact", record(), [PREPARE, RECURRENCE, TRITON], "others ran too"),
        ("exact", None, [TRITON], "FLA did not ask"),
        ("exact", record("failed", "exception"), [TRITON], "failed: exception"),
        ("exact", record("declined", "flag_type"), [TRITON], "declined: flag_type"),
        ("auto", record(kernel="wy64", params=WY64), [PREPARE64, CHAIN64], None),
        ("auto", record(kernel="wy64", params=WY64_REPLAY), [PREPARE64, REPLAY64], None),
        ("auto", record(kernel="wy64", params=WY64_REPLAY), [PREPARE64, CHAIN64], "ChainReplayWY64 did not run"),
        ("auto", record(kernel="wy64", params=WY64), [PREPARE64, REPLAY64], "ChainWY64 did not run"),
        ("auto", record(kernel="wy64", params=WY64), [PREPARE, RECURRENCE], "PrepareWY64 did not run"),
        ("auto", record("declined", "lower_bound"), [TRITON], "declined: lower_bound"),
        ("triton", None, [TRITON, "chunk_gla_fwd_kernel_o"], None),
        ("triton", None, [PREPARE, RECURRENCE], "2 kernels of ours ran"),
        ("triton", None, ["flash_kda::prepare"], "Triton kernels did not run"),
        ("triton", None, [], "no kernel"),
    ],
)
def test_which_kernels_ran_is_checked(name, seen, kernels, wrong):
    found = checks.wrong_kernels(IMPLEMENTATIONS[name], seen, kernels)
    assert wrong in " ".join(found) if wrong else found == []


@pytest.fixture
def without_gpu(monkeypatch):
    """check_all with the kernels that the profiler would see, and exact's bits, given by hand."""
    monkeypatch.setattr(checks, "launched", lambda run, repeats=1: {TRITON: 1.0})
    call = cases.inputs(SMALL, device="cpu")
    truth = gold.forward(**call)

    def failures(result, name="triton"):
        implementation = Implementation(name, {}, call=lambda **inputs: result())
        return " ".join(checks.check_all([implementation], call)[name].failures)

    return failures, truth


def test_a_right_result_passes_and_wrong_ones_fail(without_gpu):
    failures, (out, state) = without_gpu
    assert failures(lambda: (out.bfloat16(), state.float())) == ""
    assert "error" in failures(lambda: (out.bfloat16(), 1.05 * state))
    assert "error" in failures(lambda: (out.roll(1, 1), state))

    def partly_written():
        fresh = torch.empty_like(out)
        fresh[:, :30] = out[:, :30]
        return fresh, state

    assert "nothing wrote" in failures(partly_written)

    def broken():
        raise RuntimeError("launch failed")

    assert "launch failed" in failures(broken)
    assert "not the bits" in failures(lambda: (out.bfloat16(), state.float()), "exact")


def test_heads_that_are_not_checked_must_agree():
    first = checks.Checked(torch.randn(1, 8, 4, 128), torch.randn(1, 4, 128, 128))
    second = checks.Checked(first.out.clone(), first.final_state.clone())
    checks.compare_heads({"triton": first, "auto": second})
    assert second.failures == []
    second.out[:, :, 1] = first.out[:, :, 2]
    checks.compare_heads({"triton": first, "auto": second})
    assert len(second.failures) == 1 and "out" in second.failures[0] and not first.failures


def test_host_time_is_that_of_calls_without_a_sync_between(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("sync"))

    class Sleeper(types.SimpleNamespace):
        selected = staticmethod(contextlib.nullcontext)

        def __call__(self, inputs):
            events.append(inputs)
            time.sleep(self.seconds)

    found = bench.timing.host_times([Sleeper(name="slow", seconds=2e-3), Sleeper(name="fast", seconds=0)], [0, 1, 2])
    assert 2000 <= found["slow"] < 20_000 and 0 < found["fast"] < 1000
    calls = bench.timing.HOST_CALLS
    block = ["sync", *(number % 3 for number in range(calls))]
    assert events == [*(block * 2 * (1 + bench.timing.HOST_BLOCKS)), "sync"] and 20 * calls <= 1024


def test_implementations_choose_by_the_environment(monkeypatch):
    import os

    monkeypatch.setenv("FLA_KDA_CUTE", "keep")
    monkeypatch.delenv("FLA_KDA_CUTE_MODE", raising=False)
    with IMPLEMENTATIONS["exact"].selected():
        assert (os.environ["FLA_KDA_CUTE"], os.environ["FLA_KDA_CUTE_MODE"]) == ("1", "exact")
    assert os.environ["FLA_KDA_CUTE"] == "keep" and "FLA_KDA_CUTE_MODE" not in os.environ
    assert "FLA does not call it" in dataclasses.replace(IMPLEMENTATIONS["cudnn"], package=None).missing()
    assert "not installed" in Implementation("absent", {}, package="no_such_package").missing()


# ---- results ----------------------------------------------------------------------------------------------------------
def sample(date="2026-01-02T00:00:00+00:00"):
    rows = []
    for name, graph, eager in (("triton", 340.0, 1000.0), ("exact", 260.0, None), ("auto", None, 250.0)):
        checked = checks.Checked(kernel="some", err_out=4e-3, err_state=3e-3)
        times = bench.timing.Times(graph, graph, graph, eager, 50.0)
        row = bench.row(cases.CASES["fixed-T8192-H6"], "mixed", name, checked, times)
        rows.append({"date": date, **RUN, "command": "python -m benchmarks.bench", **row})
    return rows


def test_rows_have_the_columns_in_order(tmp_path):
    wanted = (
        "date, gpu, driver, torch, triton, fla, dsl, version, command, case, tokens, sequences, heads, gate, impl, kernel,"
        " graph_us, graph_p20, graph_p80, eager_us, host_us, err_out, err_state"
    )
    assert results.COLUMNS == wanted.split(", ")
    assert all(list(row) == results.COLUMNS for row in sample())
    path = tmp_path / "new" / "h200.csv"
    results.append(path, sample())
    results.append(path, sample("2026-01-03T00:00:00+00:00"))
    rows = results.read(path)
    assert len(rows) == 6 and path.read_text().splitlines()[0] == ",".join(results.COLUMNS)
    assert {row["date"] for row in results.newest(rows)} == {"2026-01-03T00:00:00+00:00"}
    path.write_text("case,us\n")
    with pytest.raises(ValueError, match="must have the columns"):
        results.read(path)


def test_report_and_summary_give_ratios(tmp_path, capsys):
    path = tmp_path / "h200.csv"
    results.append(path, sample())
    report.main([str(path)])
    lines = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells == [
        *("fixed-T8192-H6", "mixed", "340 / 1000 / 50", "260 / - / 50", "- / 250 / 50"),
        *("1.31 / -", "- / 4.00", "3.30"),
    ]
    assert lines[-3].count("|") == lines[-2].count("|") == lines[-1].count("|")
    exact = next(line for line in bench.summary(sample()) if " exact " in line)
    assert "1.31" in exact and "3.30" in exact


@pytest.mark.parametrize("case, graph, cells", [
    ("fixed-T8192-H6", 94.0, ["130 / 95", "aim"]), ("fixed-T8192-H6", 101.0, ["130 / 95", "must"]),
    ("fixed-T8192-H6", 131.0, ["130 / 95", "NO"]), ("8x1024-H12", 100.0, ["120 / -", "must"]),
    ("8x1024-H12", None, ["120 / -", "-"]),
])  # fmt: skip
def test_report_says_which_targets_are_kept(case, graph, cells, tmp_path, capsys):
    path = tmp_path / "h200.csv"
    times = bench.timing.Times(graph, graph, graph, 200.0, 50.0)
    row = bench.row(cases.CASES[case], "mixed", "auto", checks.Checked(kernel="some"), times)
    results.append(path, [{"date": "2026-01-02T00:00:00+00:00", **RUN, "command": "python -m benchmarks.bench", **row}])
    report.main([str(path), "--targets"])
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")][-2:] == cells
    assert lines[-3].count("|") == lines[-2].count("|") == lines[-1].count("|")
    assert set(cases.TARGETS) == {name for name, case in cases.CASES.items() if case.call == "flashkda"}


def test_report_compares_gates():
    rows = [{"case": "fixed-T8192-H6", "impl": impl, "gate": gate, "graph_us": us}
            for impl, times in (("auto", (100, 104, 102)), ("exact", (100, 111, 100)), ("triton", (1, 9, 9)))
            for gate, us in zip(cases.GATES, map(str, times))]  # fmt: skip
    empty, auto, exact = report.gate_spreads(rows)
    assert auto == "- fixed-T8192-H6, auto: weak gates take 1.040 times as long as strong ones"
    assert exact.endswith("1.110 times as long as strong ones, over 1.05")
    assert report.gate_spreads([row for row in rows if row["gate"] == "weak"]) == []


def test_command_repeats_the_run():
    chosen = bench.parse(["--cases", "varlen6-H12", "--gates", "all", "--out", "elsewhere.csv"])
    again = bench.parse(bench.command(chosen).split()[3:])
    assert (again.cases, again.impls, again.gates) == (chosen.cases, chosen.impls, chosen.gates)
    assert bench.command(bench.parse([])).endswith("--cases all --impls triton,exact,auto --gates mixed")
    with pytest.raises(SystemExit):
        bench.parse(["--impls", "unknown"])


def test_profile_counts_bytes():
    case = cases.CASES["fixed-T8192-H6"]
    assert case.floor_bytes == 6 * (8192 * (5 * 256 + 2) + 4 * 128 * 128)
    ours = sum(profile.traffic(case, name) for name in ("PrepareChunk16", "RecurrenceSplit"))
    assert ours == case.floor_bytes + 2 * 6 * 512 * 13888
    kimi = cases.CASES["kimi-T8192-H32"]
    assert kimi.floor_bytes == 32 * (8192 * (4 * 256 + 512 + 4) + 4 * 128 * 128)
    grouped = cases.CASES["softplus-T8192-H16-HV32"]
    assert grouped.floor_bytes == 8192 * (16 * 2 + 32 * 3) * 256 + 32 * (8192 * 2 + 4 * 128 * 128)
    rows = case.tokens * 6 * 256
    ours64 = [profile.traffic(case, name) for name in ("PrepareWY64", "ChainWY64", "ChainReplayWY64")]
    assert ours64[0] + ours64[1] == case.floor_bytes + 2 * 6 * 128 * 71168 == 5 * rows + 6 * (8192 * 2 + 65536 + 256 * 71168)
    # 112 of 128 chunks are passed by the spine first: without Q and A; 6 checkpoints are written and read
    assert ours64[2] - ours64[1] == 6 * (112 * (71168 - 16384 - 5120) + 6 * 2 * 65536)
    assert profile.traffic(cases.CASES["128x64-H12"], "ChainReplayWY64") == profile.traffic(
        cases.CASES["128x64-H12"], "ChainWY64"
    )
    lines = profile.breakdown(case, {PREPARE64: 25.0, REPLAY64: 80.0}, 4.3e6)
    assert lines[2].startswith("PrepareWY64") and lines[3].startswith("ChainReplayWY64")
    lines = profile.breakdown(case, {PREPARE: 25.0, RECURRENCE: 235.0, "memset": 1.0}, 4.3e6)
    assert lines[2].startswith("PrepareChunk16") and lines[3].startswith("RecurrenceSplit") and "261.0 us" in lines[5]
