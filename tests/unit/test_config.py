"""Where values come from, which wins, and what is said about bad ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dyn_relay.config import OPTIONS, Config, ConfigError, Option, load
from dyn_relay.config.__main__ import reference
from dyn_relay.fleet.stage import configured

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def option(name: str) -> Option:
    return next(option for option in OPTIONS if option.name == name)


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "relay.toml"
    path.write_text(text)
    return str(path)


def test_the_page_is_current() -> None:
    """If this fails: `python -m dyn_relay.config > docs/configuration.md`."""
    assert PAGE.read_text() == reference()


def test_defaults_that_users_rely_on() -> None:
    config = Config()
    assert (config.host, config.port, config.policy, config.format) == ("127.0.0.1", 30000, "least_loaded", "sglang")
    assert config.request_timeout_secs == 0
    assert config.health_check_timeout_secs > 20  # stock /health takes up to that
    assert config.upstream_pool_idle_timeout_secs < 5  # stock keep-alive
    assert config.keep_alive_timeout_secs >= 75


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'migration_limit = 1\nlog_level = "debug"\npolicy = "random"\n')
    environ = {"DYN_MIGRATION_LIMIT": "2", "DYN_LOG_LEVEL": "error"}
    loaded = load({"migration_limit": "5"}, environ, path)
    assert (loaded.config.migration_limit, loaded.config.log_level, loaded.config.policy) == (5, "error", "random")
    where = loaded.origins
    assert (where["migration_limit"], where["log_level"], where["policy"]) == (
        "--migration-limit",
        "DYN_LOG_LEVEL",
        path,
    )
    assert where["host"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = toml(tmp_path, "port = 0\n")
    assert load({}, {"DYN_CONFIG": path}).config.port == 0
    other = tmp_path / "other.toml"
    other.write_text("port = 1\n")
    assert load({}, {"DYN_CONFIG": path}, str(other)).config.port == 1


def test_names_of_dynamo_users() -> None:
    environ = {
        "DYN_MIGRATION_LIMIT": "0",
        "DYN_MIGRATION_MAX_SEQ_LEN": "65536",
        "DYN_RUNTIME_INHIBITED_DURATION_SECS": "7.5",
    }
    config = load({}, environ).config
    assert (config.migration_limit, config.migration_max_seq_len, config.inhibited_duration_secs) == (0, 65536, 7.5)


def test_an_empty_environment_value_is_unset() -> None:
    loaded = load({}, {"DYN_API_KEY": "", "DYN_PORT": ""})
    assert loaded.config.api_key is None
    assert loaded.origins["port"] == "default"


@pytest.mark.parametrize(
    "raw",
    ["http://a:1,http://b:2", "http://a:1 http://b:2", "http://a:1, http://b:2,", "http://a:1,http://b:2,http://a:1"],
)
def test_worker_urls_are_split(raw: str) -> None:
    assert load({}, {"DYN_WORKER_URLS": raw}).config.worker_urls == ("http://a:1", "http://b:2")


def test_worker_urls_in_a_file(tmp_path: Path) -> None:
    config = load({}, {}, toml(tmp_path, 'worker_urls = ["http://a:1", "http://b:2"]')).config
    assert config.worker_urls == ("http://a:1", "http://b:2")


@pytest.mark.parametrize(("raw", "value"), [("true", True), ("1", True), ("on", True), ("No", False), ("0", False)])
def test_switches_in_the_environment(raw: str, value: bool) -> None:
    assert load({}, {"DYN_LOG_JSON": raw}).config.log_json is value


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("port", "x", "whole number"),
        ("port", "1.5", "whole number"),
        ("port", "-1", "at least 0"),
        ("port", "65536", "at most 65535"),
        ("migration_max_seq_len", "0", "at least 1"),
        ("stall_timeout_secs", "soon", "a number"),
        ("stall_timeout_secs", "nan", "a number"),
        ("stall_timeout_secs", "inf", "a number"),
        ("health_check_interval_secs", "0", "at least 0.001"),
        ("health_check_endpoint", "health", "begin with /"),
        ("coalesce_ms", "-1", "at least 0"),
        ("coalesce_ms", "1001", "at most 1000"),
        ("coalesce_ms", "5ms", "a number"),
        ("policy", "best", "one of least_loaded, round_robin"),
        ("on_abort", "", "one of relay, resume"),
        ("log_json", "maybe", "true or false"),
        ("worker_urls", "ftp://a", "scheme"),
        ("worker_urls", "http://a:1,b:2", "'b:2'"),
        ("discovery_dns", "engines", "NAME:PORT"),
        ("discovery_dns", "http://engines", "NAME:PORT"),
        ("discovery_dns", "a/b:80", "NAME:PORT"),
        ("discovery_dns", "engines:0", "port 0"),
        ("selector", "app", "'app': must be KEY=VALUE"),
        ("selector", "app==a", "must be KEY=VALUE"),
        ("service_discovery_namespace", "../prod", "lower-case"),
        ("service_discovery_port", "0", "at least 1"),
    ],
)
def test_a_bad_value_is_named_with_its_source(name: str, raw: str, words: str) -> None:
    flag = option(name).flag
    with pytest.raises(ConfigError, match=name) as caught:
        load({name: raw}, {})
    assert words in str(caught.value)
    assert f"(from {flag})" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = '1'\nnonsense = 2", "nonsense: no such option"),
        ("port = [", "not TOML"),
        ("log_json = 1", "log_json: must be true or false"),
        ("port = true", "port: must be a whole number"),
        ("host = 5", "host: must be a string"),
        ("worker_urls = [1]", "worker_urls: must be a list"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, path)
    assert words in str(caught.value)
    assert path in str(caught.value)


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load({}, {}, "/nowhere/relay.toml")


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="migration_limit"):
        Config(migration_limit=-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"service_discovery": True}, "service_discovery: needs a selector"),
        ({"selector": ("app=a",)}, "selector: finds nobody without service_discovery"),
    ],
)
def test_kubernetes_needs_a_selector_and_a_selector_kubernetes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config(**options)


def test_kubernetes_without_its_extra_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is said what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"service_discovery: .*pip install 'dyn-relay\[kubernetes\]'"):
        Config(service_discovery=True, selector=("app=a",))
    Config(service_discovery=False)


def test_secrets_are_never_shown() -> None:
    """L1."""
    secrets = [option.name for option in OPTIONS if option.secret]
    assert secrets == ["api_key", "worker_api_key", "admin_api_key"]
    config = load(dict.fromkeys(secrets, "hunter2"), {}).config
    assert "hunter2" not in repr(config)
    assert {option(name).show(getattr(config, name)) for name in secrets} == {"***"}


def test_names_are_unique() -> None:
    for names in ([o.flag for o in OPTIONS], [o.env for o in OPTIONS]):
        assert len(set(names)) == len(names)
    assert all(option.env.startswith("DYN_") for option in OPTIONS)


def test_two_engines_may_have_one_bootstrap_port() -> None:
    """`--prefill URL PORT URL PORT`: what is one item to a set is two here."""
    flags = {
        "pd_disaggregation": True,
        "prefill": ["http://a:1", "8998", "http://b:1", "8998"],
        "decode": ["http://c:1"],
    }
    config = load(flags, {}).config
    assert config.prefill == ("http://a:1", "8998", "http://b:1", "8998")
    assert [named.bootstrap_port for named in configured(config)] == [8998, 8998, None]


PAIR = {"pd_disaggregation": True, "decode": ["http://c:1"]}


@pytest.mark.parametrize(
    ("prefill", "found"),
    [
        (["http://a:1", "none", "http://b:1", "8998"], [None, 8998]),
        (["http://a:1", "None"], [None]),
        (["http://a:1", "8998", "http://a:1", "8998"], [8998, 8998]),
        (["http://a:1", "http://a:1/", "none"], [None, None]),
    ],
)
def test_a_port_may_be_none_and_a_name_be_repeated(prefill: list[str], found: list[int | None]) -> None:
    """SMG's spelling of no port; one and the same name twice is one."""
    config = load({**PAIR, "prefill": prefill}, {}).config
    assert [named.bootstrap_port for named in configured(config)] == [*found, None]


@pytest.mark.parametrize(
    ("prefill", "words"),
    [
        (["none"], "none: must be a port behind a URL"),
        (["http://a:1", "none", "8998"], "8998: must be a port behind a URL"),
        (["http://a:1", "70000"], "70000: must be a port behind a URL"),
        (
            ["http://a:1", "8998", "http://b:1", "http://a:1/", "1"],
            "http://a:1 is named with two ports, by --prefill http://a:1 8998 and --prefill http://a:1 1",
        ),
        (["http://a:1", "http://a:1", "1"], "by --prefill http://a:1 none and --prefill http://a:1 1"),
        (["http://c:1/", "8998"], "http://c:1 is named by both --prefill and --decode"),
    ],
)
def test_what_prefill_cannot_be(prefill: list[str], words: str) -> None:
    """Two ports of one engine, one engine for both roles: neither may win in silence."""
    with pytest.raises(ConfigError) as caught:
        load({**PAIR, "prefill": prefill}, {})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "spelling",
    [
        '["http://a:1", 8998, "http://b:1"]',
        '["http://a:1", "8998", "http://b:1"]',
        '[["http://a:1", 8998], ["http://b:1"]]',
        '[["http://a:1", 8998], "http://b:1"]',
        '["http://a:1 8998", "http://b:1 none"]',
        '"http://a:1 8998 http://b:1"',
    ],
)
def test_prefill_in_a_file(tmp_path: Path, spelling: str) -> None:
    path = toml(tmp_path, f'pd_disaggregation = true\ndecode = ["http://c:1"]\nprefill = {spelling}\n')
    named = configured(load({}, {}, path).config)
    assert [(str(one.origin), one.bootstrap_port) for one in named[:2]] == [("http://a:1", 8998), ("http://b:1", None)]


@pytest.mark.parametrize("spelling", ["8998", '["http://a:1", 8998.5]', '["http://a:1", true]', '[[["http://a:1"]]]'])
def test_prefill_in_a_file_that_is_none(tmp_path: Path, spelling: str) -> None:
    path = toml(tmp_path, f"pd_disaggregation = true\nprefill = {spelling}\n")
    with pytest.raises(ConfigError, match="prefill: must be a list of strings, ports among them"):
        load({}, {}, path)


@pytest.mark.parametrize(
    "flags", [{"prefill": ["http://a:1"]}, {"pd_disaggregation": True, "worker_urls": ["http://a:1"]}]
)
def test_options_of_pairs_name_the_flag_that_makes_them(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"\(--pd-disaggregation\)"):
        load(flags, {})
