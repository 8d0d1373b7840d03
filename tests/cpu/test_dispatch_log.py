"""The record of decisions: ring, counts, logger, captures, file."""

import json
import logging
import multiprocessing
import os
import threading
import time
import types

import pytest
import torch
from calls import prefill, tensor

from fla_kda_backend import dispatch_log
from fla_kda_backend.call import Call, parse
from fla_kda_backend.dispatch_log import ACCEPTED, DECLINED

PLAN = types.SimpleNamespace(kernel="column_split", params={"bv": 64, "grid": 24})


@pytest.fixture(autouse=True)
def empty():
    dispatch_log.clear()
    yield
    dispatch_log.clear()


def accept(number=1, **changes):
    call = parse((), prefill(**changes))
    for _ in range(number):
        dispatch_log.record(ACCEPTED, "accepted", "all rules hold", call, PLAN)


def decline(message="requires K = V = 128, got K=64, V=64", call=None):
    dispatch_log.record(DECLINED, "head_dim", message, call or parse((), prefill()))


def test_record_of_an_accepted_call():
    accept(batch=1, cu_seqlens=tensor(4, dtype=torch.int32), initial_state=None, scale=0.5)
    (record,) = dispatch_log.records()
    found = json.loads(json.dumps(record.to_dict()))
    assert abs(found.pop("time") - time.time()) < 60
    assert found == {
        "pid": os.getpid(),
        "outcome": "accepted",
        "code": "accepted",
        "message": "all rules hold",
        "kernel": "column_split",
        "params": {"bv": 64, "grid": 24},
        "num_sequences": 3,
        "device": "meta",
        "shapes": {
            **dict.fromkeys("qkvg", [1, 80, 4, 128]),
            "beta": [1, 80, 4],
            "cu_seqlens": [4],
            "A_log": [4],
            "dt_bias": [512],
        },
        "dtypes": {
            **dict.fromkeys([*"qkvg", "beta"], "bfloat16"),
            "cu_seqlens": "int32",
            "A_log": "float32",
            "dt_bias": "float32",
        },
        "arguments": {
            "scale": 0.5,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": False,
            "safe_gate": True,
            "lower_bound": -5.0,
            "state_v_first": True,
            "return_intermediate_states": False,
            "chunk_size": 64,
            "use_graph": False,
        },
    }


@pytest.mark.parametrize(
    "call",
    [
        Call(malformed="takes 22 positional arguments, got 23"),
        Call(q=3, k="k", cu_seqlens=[0, 1]),
        parse((), prefill(q=None, scale=tensor(1), lower_bound=tensor(1))),
        parse((), prefill(q=tensor(), cu_seqlens=tensor())),
    ],
    ids=["malformed", "no tensors", "tensors as numbers", "no dimensions"],
)
def test_any_call_can_be_recorded(call):
    decline(call=call)
    (record,) = dispatch_log.records()
    json.dumps(record.to_dict())
    held = [*record.arguments, *record.shapes, *record.dtypes, record.device]
    assert not any(isinstance(value, torch.Tensor) for value in held)


def test_ring_is_bounded_and_counts_are_not():
    accept(dispatch_log.RING_SIZE + 10)
    assert len(dispatch_log.records()) == dispatch_log.RING_SIZE
    assert [count.count for count in dispatch_log.summary()] == [dispatch_log.RING_SIZE + 10]


def test_summary_counts_distinct_decisions():
    accept(2)
    for _ in range(3):
        decline()
    decline("requires K = V = 128, got K=256, V=256")
    assert [tuple(row) for row in dispatch_log.summary()] == [
        (3, "declined", "head_dim", "requires K = V = 128, got K=64, V=64", None, ()),
        (2, "accepted", "accepted", "all rules hold", "column_split", (("bv", 64), ("grid", 24))),
        (1, "declined", "head_dim", "requires K = V = 128, got K=256, V=256", None, ()),
    ]


def test_distinct_decisions_are_bounded(monkeypatch):
    monkeypatch.setattr(dispatch_log, "MAX_DISTINCT", 3)
    for number in range(10):
        decline(f"got {number}")
    counts = dispatch_log.summary()
    assert len(counts) == 4
    assert sum(row.count for row in counts) == 10


def test_clear():
    accept()
    dispatch_log.clear()
    assert dispatch_log.records() == [] and dispatch_log.summary() == []


def test_capture_nests_and_ends():
    with dispatch_log.capture() as outer:
        accept()
        with dispatch_log.capture() as inner:
            decline()
    accept()
    assert [record.outcome for record in outer] == ["accepted", "declined"]
    assert [record.outcome for record in inner] == ["declined"]


def test_logger_gets_a_distinct_decision_once_at_info(caplog):
    with caplog.at_level(logging.DEBUG, "fla_kda_backend"):
        accept(2)
        decline()
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.DEBUG, logging.INFO]
    assert caplog.messages[0] == (
        "chunk_kda accepted column_split bv=64 grid=24 [accepted] all rules hold; q=[2, 80, 4, 128] sequences=2 on meta"
    )


def test_threads_lose_nothing():
    threads = [threading.Thread(target=accept, args=(500,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row.count for row in dispatch_log.summary()] == [4000]


def test_an_entry_is_recorded_as_any_other_decision(caplog):
    call = parse((), prefill())
    entry = dispatch_log.entry(ACCEPTED, "accepted", "all rules hold", call, PLAN)
    with caplog.at_level(logging.DEBUG, "fla_kda_backend"), dispatch_log.capture() as seen:
        entry.record()
        accept(1)
        entry.record()
        dispatch_log.clear()
        entry.record()
        accept(1)
        assert [row.count for row in dispatch_log.summary()] == [2] and len(dispatch_log.records()) == 2
    assert len({record[1:] for record in seen}) == 1 and len(seen) == 5
    assert [record.time for record in seen] == sorted({record.time for record in seen})
    levels = [logging.INFO, logging.DEBUG, logging.DEBUG, logging.INFO, logging.DEBUG]
    assert [record.levelno for record in caplog.records] == levels


def test_a_decision_that_cannot_be_described_is_left_out():
    class Broken:
        shape = property(lambda self: 1 / 0)

    dispatch_log.entry(DECLINED, "head_dim", "", Call(q=Broken())).record()
    assert dispatch_log.records() == []


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_file_gets_a_line_for_each_decision(monkeypatch, tmp_path):
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text('{"was": "there"}\n')
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(path))
    accept(2)
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(other))
    decline()
    monkeypatch.delenv("FLA_KDA_CUTE_LOG")
    decline()
    assert [line.get("outcome") for line in lines(path)] == [None, "accepted", "accepted"]
    assert [line["outcome"] for line in lines(other)] == ["declined"]


def test_file_is_shared_by_forked_processes(monkeypatch, tmp_path):
    path = tmp_path / "log.jsonl"
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(path))
    accept()  # the children inherit the open file
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=accept, args=(200,)) for _ in range(4)]
    for child in children:
        child.start()
    accept(200)
    for child in children:
        child.join()
    found = lines(path)
    assert len(found) == 1001
    assert len({line["pid"] for line in found}) == 5


def test_fork_while_another_thread_holds_the_lock():
    with dispatch_log._lock:
        child = multiprocessing.get_context("fork").Process(target=accept)
        child.start()
        child.join(20)
        child.kill()  # one that hangs would be waited for at exit
    assert child.exitcode == 0


def test_file_that_cannot_be_written_is_warned_of_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(tmp_path / "missing" / "log.jsonl"))
    accept(2)
    assert len(dispatch_log.records()) == 2
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


# ---- what the file may be ------------------------------------------------------------------------------------------------
def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def within(seconds, work):
    """Run in a thread, which may be left behind."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@pytest.fixture
def fifo(tmp_path, monkeypatch):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(path))
    yield path
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # lets go whoever waits for a reader


def test_a_pipe_that_nobody_reads_stops_no_call(fifo, caplog):
    """What it does not take is lost, which is said once; once there is a reader, it gets the lines."""
    assert within(20, lambda: accept(3))
    (message,) = warnings(caplog)
    assert str(fifo) in message and "nobody reads from it" in message
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    accept(2)
    assert os.read(reader, 1 << 20).count(b'"outcome"') == 2
    os.close(reader)
    assert within(20, lambda: accept(2)) and len(warnings(caplog)) == 1
    assert len(dispatch_log.records()) == 7


def test_a_pipe_that_is_full_stops_no_call(fifo, caplog):
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert within(20, lambda: accept(200))
    assert len(warnings(caplog)) == 1 and len(dispatch_log.records()) == 200
    held = os.read(reader, 1 << 20).splitlines()
    assert 0 < len(held) < 200
    accept()
    assert [json.loads(line)["outcome"] for line in (held[0], held[-1], os.read(reader, 1 << 20))] == ["accepted"] * 3
    os.close(reader)


def test_a_line_that_was_cut_is_ended_before_the_next(monkeypatch, tmp_path):
    path = tmp_path / "log.jsonl"
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(path))
    accept()
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: real(descriptor, line[:40]))
    accept()
    monkeypatch.setattr(os, "write", real)
    accept()
    whole, cut, last = path.read_text().splitlines()
    assert json.loads(whole)["pid"] == json.loads(last)["pid"] == os.getpid() and len(cut) == 40


@pytest.mark.parametrize("how", ["renamed", "removed", "replaced", "truncated"])
def test_the_file_follows_its_rotation(how, monkeypatch, tmp_path, caplog):
    path, old = tmp_path / "calls.jsonl", tmp_path / "calls.1"
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(path))
    accept(2)
    descriptors = len(os.listdir("/proc/self/fd"))
    if how == "renamed":
        path.rename(old)
    elif how == "removed":
        path.unlink()
    elif how == "replaced":
        old.touch()
        old.replace(path)
    else:
        os.truncate(path, 0)
    accept(3)
    assert len(lines(path)) == 3 and not warnings(caplog)
    if how == "renamed":
        assert len(lines(old)) == 2
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("place", ["a directory", "a link to itself", "a removed folder"])
def test_what_is_no_place_for_a_file(place, monkeypatch, tmp_path, caplog):
    path = tmp_path / "folder" / "log"
    path.parent.mkdir()
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(path))
    if place == "a directory":
        path.mkdir()
    elif place == "a link to itself":
        path.symlink_to(path)
    else:
        accept()
        path.unlink()
        path.parent.rmdir()
    accept(3)
    assert len(warnings(caplog)) == 1


def test_cost_of_a_record():
    call = parse((), prefill())

    def microseconds():
        start = time.thread_time()
        for _ in range(1000):
            dispatch_log.record(ACCEPTED, "accepted", "all rules hold", call, PLAN)
        return (time.thread_time() - start) * 1e3

    microseconds()
    # It is to take 5 us on an idle machine; this one may be busy with other things.
    assert min(microseconds() for _ in range(10)) < 10
