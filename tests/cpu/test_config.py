"""The table of environment variables."""

import logging
import os
import re
from pathlib import Path

import pytest

from fla_kda_backend import config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(config, "_warned", set())


ON, OFF = ("1", "true", "on", "yes", "True", "ON", "Yes"), ("0", "false", "off", "no", "FALSE", "Off", "NO")
SWITCHED = {**dict.fromkeys(ON, True), **dict.fromkeys(OFF, False)}


@pytest.mark.parametrize(
    ("variable", "default", "values"),
    [
        (config.ENABLED, True, {**SWITCHED, "": True}),
        (config.MODE, "auto", {"auto": "auto", "exact": "exact", "": "auto"}),
        (config.STRICT, False, {**SWITCHED, "": False}),
        (config.LOG, None, {"a.jsonl": "a.jsonl", "": None}),
        (config.UNTESTED, True, {**SWITCHED, "": True}),
        (config.DETERMINISTIC, False, {**SWITCHED, "": False}),
        (config.CACHE_DIR, None, {"/tmp/x": "/tmp/x", "": None, "off": "off"}),
        (config.CACHE_MIB, 1024, {"0": 0, "77": 77, "": 1024}),
        (config.CACHE_MANIFEST, None, {"0" * 64: "0" * 64, "": None}),
        (config.WORKSPACE_MIB, 2048, {"0": 0, "77": 77, "": 2048}),
        (config.COMPILE, "in_place", {"background": "background", "in_place": "in_place", "": "in_place"}),
    ],
    ids=lambda value: value.name if isinstance(value, config.Variable) else "",
)
def test_values_are_read_at_each_call(monkeypatch, caplog, variable, default, values):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.get() == default
    for raw, value in values.items():
        monkeypatch.setenv(variable.name, raw)
        assert variable.get() == value, raw
    assert not caplog.records


@pytest.mark.parametrize("variable", [config.ENABLED, config.MODE, config.STRICT, config.UNTESTED], ids=lambda v: v.name)
def test_bad_value_is_warned_of_once_and_the_default_holds(monkeypatch, caplog, variable):
    default = variable.meaning(variable.default)
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        monkeypatch.setenv(variable.name, "2")
        assert [variable.get(), variable.get()] == [default, default]
        monkeypatch.setenv(variable.name, "fast")
        assert variable.get() == default
    assert len(caplog.records) == 2
    assert f"{variable.name}='2' is not {variable.expected}; {variable.default!r} holds" in caplog.records[0].getMessage()


@pytest.mark.parametrize("raw", ["-1", "1.5", "1 GiB", "\u0663"])
def test_a_size_that_is_no_whole_number(monkeypatch, caplog, raw):
    monkeypatch.setenv(config.CACHE_MIB.name, raw)
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        assert [config.CACHE_MIB.get(), config.CACHE_MIB.get()] == [1024, 1024]
    (record,) = caplog.records
    assert f"{config.CACHE_MIB.name}={raw!r} is not a whole number; '1024' holds" in record.getMessage()


def test_a_switch_says_every_value_that_it_takes():
    assert config.ENABLED.expected == "one of 1, 0, true, on, yes, false, off, no"


def test_unknown_names_are_warned_of_once(monkeypatch, caplog):
    config.warn_of_unknown.cache_clear()
    assert config.unknown() == []
    monkeypatch.setenv("FLA_KDA_CUTE_STIRCT", "1")
    monkeypatch.setenv("FLA_KDA_CUTES", "1")
    assert config.unknown() == ["FLA_KDA_CUTES", "FLA_KDA_CUTE_STIRCT"]
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        config.warn_of_unknown()
        config.warn_of_unknown()
    config.warn_of_unknown.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "FLA_KDA_CUTES, FLA_KDA_CUTE_STIRCT: no such variable; there are FLA_KDA_CUTE, FLA_KDA_"
    )


@pytest.mark.parametrize("environ", [{}, {"FLA_KDA_CUTE_MODE": "exact", "FLA_KDA_CUTE": "0"}])
def test_an_environment_that_somebody_replaced(monkeypatch, environ):
    monkeypatch.setattr(os, "environ", environ)
    assert (config.MODE.get(), config.ENABLED.get()) == (("exact", False) if environ else ("auto", True))
    environ["FLA_KDA_CUTE_MODE"] = "auto"
    assert (config.MODE.raw(), config.MODE.get()) == ("auto", "auto")


def test_raw_values_follow_the_environment(monkeypatch):
    seen = [config.LOG.raw()]
    for value in ("", "a", "\udcff", "b"):
        monkeypatch.setenv(config.LOG.name, value)
        seen.append(config.LOG.raw())
        assert config.LOG.get() == (value or None)
    monkeypatch.delenv(config.LOG.name)
    assert seen[0] is None and len(set(seen)) == 5 and config.LOG.raw() is None


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", str(tmp_path))
    assert config.cache_dir() == tmp_path
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", "off")
    assert config.cache_dir() is None
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", "~/x")
    assert config.cache_dir() == Path.home() / "x"
    monkeypatch.delenv("FLA_KDA_CUTE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / "fla_kda_backend"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / ".cache" / "fla_kda_backend"


def test_readme_has_the_same_table():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    documented = [(name, values, default, doc) for name, values, default, doc in rows]
    assert documented == [(v.name, v.values, v.default or "not set", v.doc) for v in config.VARIABLES]


def test_no_other_variable_of_ours_is_read():
    names = set()
    for path in (ROOT / "fla_kda_backend").rglob("*.py"):
        names |= set(re.findall(r"FLA_KDA_CUTE\w*", path.read_text()))
    assert names == {variable.name for variable in config.VARIABLES}
