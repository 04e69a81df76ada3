"""`dyn-relay explain`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dyn_relay.cli import main
from dyn_relay.config import CONFIG_ENV, OPTIONS

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 80}, "stream": True}
WORKER = [sys.executable, "-c", "from dyn_testkit.cli import main; main()", "--port", "0"]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (CONFIG_ENV, *(option.env for option in OPTIONS)):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "body.json"
    file.write_text(json.dumps(BODY))
    return file


def run(*args: object, env: dict[str, str] | None = None, typed: str | None = None) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, args)], env=env, input=typed)


@contextmanager
def worker(*flags: str, line: int = 0) -> Iterator[str]:
    """The URL that it says in that line."""
    process = subprocess.Popen([*WORKER, *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield [process.stdout.readline() for _ in range(line + 1)][line].removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.communicate()


def test_people_see_the_verdict_and_the_continuation(path: Path) -> None:
    result = run(path, "--after", 20)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "x-dyn-relay-migratable: yes"
    assert "no worker was asked; judged for a stock one:" in lines
    assert '    "input_ids": [1, 2, 3, 0, 0, 0, "... 11 more ...", 0, 0, 0, 0, 0, 0],' in lines
    assert '    "sampling_params": {"max_new_tokens": 60},' in lines
    assert "if its worker died after 1 token, another one would get" in run(path).output.splitlines()
    assert any("all 0, stand for what the first worker would have generated" in line for line in lines)
    assert "  - takes a prompt of 23 tokens (`max_req_input_len`), or does not say" in lines


def test_people_see_the_field_and_the_reason(path: Path) -> None:
    path.write_text(json.dumps({**BODY, "sampling_params": {"max_new_tokens": 5, "regex": "x"}}))
    header, rule, because, then = run(path).output.splitlines()[:4]
    assert header == "x-dyn-relay-migratable: no; reason=regex"
    assert rule == '  `regex` (`sampling_params`): refused if anything but `null`, `""`'
    assert because.startswith("  because: the grammar starts at its root")
    assert then == "  if its worker dies, it fails loudly"
    path.write_text('{"input_ids":[-1]}')
    assert "  400 {" in run(path).output


def test_programs_get_json(path: Path) -> None:
    found = json.loads(run(path, "--json", "--after", 20).output)
    assert found["continuation"]["body"]["input_ids"] == [1, 2, 3, *[0] * 20]
    assert found["header"] == {"x-dyn-relay-migratable": "yes"}


def test_a_worker_is_asked(path: Path) -> None:
    with worker("--dialect", "incremental", "--with-tokenizer") as url:
        found = json.loads(run(path, "--json", "--worker", url).output)
        assert "judged for this worker:" in run(path, "--worker", url).output
        path.write_text(json.dumps({**BODY, "return_routed_experts": True}))
        assert "  it lacks what is asked for (routed_experts)" in run(path, "--worker", url).output
    told = found["worker"]
    assert (told["url"], told["incremental"], told["text"]) == (url, True, True)
    assert any("as the first worker" in one or "of at least" in one for one in found["needs"])


def test_a_worker_behind_grpc_is_asked_and_what_cannot_be_carried_is_said(path: Path) -> None:
    with worker("--dialect", "incremental", "--grpc-port", "0", line=1) as url:
        assert url.startswith("grpc://")
        found = json.loads(run(path, "--json", "--worker", url).output)
        assert (found["worker"]["url"], found["worker"]["incremental"], found["answer"]) == (url, True, None)
        assert found["continuation"]["body"]["input_ids"] == [1, 2, 3, 0]
        path.write_text(json.dumps({**BODY, "cache_salt": "x"}))
        lines = run(path, "--worker", url).output
        assert '400 {"error":"cache_salt: ' in lines
        assert "another one would get" not in lines
        assert "another one would get" in run(path, "--worker", url, "--http-fallback").output


def test_a_worker_that_wants_a_key(path: Path) -> None:
    with worker("--api-key", "k") as url:
        result = run(path, "--worker", url)
        assert result.exit_code == 1
        assert f"worker: {url}/model_info gave 401; see DYN_WORKER_API_KEY" in result.output
        assert run(path, "--worker", url, env={"DYN_WORKER_API_KEY": "k"}).exit_code == 0


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("http://127.0.0.1:1", 1, "worker: http://127.0.0.1:1/model_info cannot be read"),
        ("grpc://127.0.0.1:1", 1, "worker: grpc://127.0.0.1:1/model_info cannot be read"),
        ("127.0.0.1:1", 2, "worker: "),
        ("http://", 2, "worker: "),
    ],
)
def test_a_worker_that_cannot_be_asked(path: Path, url: str, code: int, words: str) -> None:
    result = run(path, "--worker", url)
    assert (result.exit_code, words in result.output) == (code, True), result.output


def test_bad_input_is_named(path: Path) -> None:
    for args, words in [
        ((path.parent / "no.json",), "body: cannot read"),
        ((path, "--after", 81), "after: must be at most the request's 80 tokens, not 81"),
        ((path, "--after", -1), "after: must be at least 0"),
        ((path, "--after", "x"), "'--after'"),
        ((path, "--config", path), "config: "),
    ]:
        result = run(*args)
        assert (result.exit_code, words in result.output) == (2, True), result.output
    path.write_text("[1")
    assert "body: must be a JSON object" in run(path).output


def test_the_proxys_own_options_count(path: Path) -> None:
    result = run(path, env={"DYN_MIGRATION_LIMIT": "0"})
    assert result.output.startswith("x-dyn-relay-migratable: no; reason=migration_limit\n")
    config = path.with_suffix(".toml")
    config.write_text("migration_max_seq_len = 5\n")
    assert "would fail loudly, with the reason migration_max_seq_len" in run(
        path, "--after", 3, "--config", config
    ).output.replace("\n", " ")


def test_its_options_say_what_the_proxy_is_run_with(path: Path) -> None:
    found = json.loads(run(path, "--json", "--weight-version-policy", "max-lag=2").output)
    assert "has weights that may follow, by `--weight-version-policy max-lag=2`" in found["needs"]
    path.write_text(json.dumps({**BODY, "input_ids": [[1], [2]]}))
    assert run(path).output.startswith("x-dyn-relay-migratable: no; reason=batch\n")
    lines = run(path, "--split-batches").output.splitlines()
    assert lines[0] == "x-dyn-relay-migratable: yes"
    assert lines[1] == "  split into 2; this is number 0, and so on with the others"
    result = run(path, "--weight-version-policy", "no")
    assert (result.exit_code, "weight_version_policy" in result.output) == (2, True)


def test_standard_input(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dyn_relay", "explain", "-", "--json"],
        input=path.read_bytes(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["migratable"] is True
