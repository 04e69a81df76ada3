"""Whatever is wrong with a worker, the check that is about it finds it, by name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from contract_kit import broken, setup

from dyn_relay.net import Connection, ConnectionBroken
from dyn_testkit import engine
from dyn_testkit.contract import CHECKS
from dyn_testkit.worker import MockWorker, contract, control, core, generate, http, jobs, render, scheduler, wire
from dyn_testkit.worker.render import Live, Renderer
from dyn_testkit.worker.schema import WrongType
from dyn_testkit.worker.wire import Reply, Request

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], object]
#: Changes an answer; `live` and `unary` tell which one it is.
Change = Callable[[dict[str, Any], Live, bool], object]


def answers(change: Change) -> Plant:
    """Every unary answer and event is changed."""

    class Bent(Renderer):
        def answer(self, live: Live, version: str, finish: Any, *, unary: bool) -> dict[str, Any]:
            value = super().answer(live, version, finish, unary=unary)
            change(value, live, unary)
            return value

    return lambda patch: patch.setattr(core, "Renderer", Bent)


def metas(change: Callable[[dict[str, Any]], object]) -> Plant:
    """The `meta_info` of every answer is changed."""
    return answers(lambda value, live, unary: change(value["meta_info"]))


def finished(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Plant:
    """The value and `meta_info` of every answer with a finish are changed."""
    return answers(lambda value, live, unary: value["meta_info"]["finish_reason"] and change(value, value["meta_info"]))


def rows(name: str, change: Callable[[Any], Any]) -> Plant:
    """Every row of a list in `meta_info` is changed."""
    return metas(lambda meta: name in meta and meta.update({name: [change(row) for row in meta[name]]}))


def setting(place: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(place, name, value)


def route(path: str, reply: Reply | Callable[[Any], Any]) -> Plant:
    """Another answer of a path, or the value of its JSON changed."""

    def plant(patch: Patch) -> None:
        methods, admin, handler = control.ROUTES[path]

        async def other(worker: MockWorker, request: Request) -> Reply:
            if isinstance(reply, Reply):
                return reply
            value = json.loads((await handler(worker, request)).body)
            reply(value)
            return wire.json_reply(value)

        patch.setitem(control.ROUTES, path, (methods, admin, other))

    return plant


def steps(change: Callable[[list[int], int, engine.Step], engine.Step]) -> Plant:
    """The engine's steps are changed, given the prompt and the count."""
    real = engine.generate

    def generated(model: Any, prompt: Any, *more: Any) -> Any:
        for count, step in enumerate(real(model, prompt, *more), 1):
            yield change(prompt, count, step)

    return lambda patch: patch.setattr(engine, "generate", generated)


def moody() -> Plant:
    """Every request's tokens are others."""
    asked: list[Any] = []

    def change(prompt: list[int], count: int, step: engine.Step) -> engine.Step:
        asked.append(prompt)
        return step._replace(token=(step.token + len(asked)) % 300)

    return steps(change)


def routed(patch: Patch) -> None:
    real = render.routed_experts
    patch.setattr(render, "routed_experts", lambda job, ids, options: real(job, [*ids, 0], options))


def unslashed(patch: Patch) -> None:
    real = control.method_refused

    def refused(request: Request) -> Reply | None:
        lost = request.path.endswith("/")
        return wire.json_reply({"detail": "Not Found"}, 404) if lost else real(request)

    patch.setattr(http, "method_refused", refused)


def lost(patch: Patch) -> None:
    real = control.method_refused
    page = Reply(404, b"<h1>Not Found</h1>", b"text/html")
    patch.setattr(http, "method_refused", lambda request: page if request.path == "/no/such/path" else real(request))


def headed(patch: Patch) -> None:
    _, admin, handler = control.ROUTES["/health"]
    patch.setitem(control.ROUTES, "/health", (("GET", "HEAD"), admin, handler))


def deaf(patch: Patch) -> None:
    """It generates on for clients that have left."""
    real = generate._Answer._send

    async def send(self: Any, *more: Any) -> None:
        try:
            await real(self, *more)
        except ConnectionBroken:
            pass

    async def watch(worker: MockWorker, connection: Connection, request: Request, keep: bool) -> None:
        await http._generate_watched(worker, connection, request, keep)

    patch.setattr(generate._Answer, "_send", send)
    patch.setattr(http, "_generate", watch)


def welcoming(patch: Patch) -> None:
    """A live rid is taken again."""

    def enter(self: scheduler.Scheduler, job: jobs.Job) -> Live:
        self.live[job.rid] = live = Live(job, trio.current_time())
        return live

    patch.setattr(scheduler.Scheduler, "enter", enter)


def aborting(match: Callable[[str, str], bool], finish: dict[str, Any] | None = None) -> Plant:
    def abort(self: scheduler.Scheduler, rid: str, *, everything: bool = False) -> list[str]:
        for name, live in self.live.items():
            if everything or match(name, rid):
                live.abort = finish or scheduler.ABORTED
        self.changed()
        return []

    return setting(scheduler.Scheduler, "abort", abort)


def parsing(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """Sampling parameters are read as if they were others."""
    real = engine.Sampling.parse

    def parse(given: Any, defaults: Any = None) -> engine.Sampling:
        return real(change(given), defaults)

    return setting(engine.Sampling, "parse", parse)


def charset(patch: Patch) -> None:
    kind = b"application/json; charset=utf-8"
    patch.setattr(generate, "json_reply", lambda value: Reply(200, msgspec.json.encode(value), kind))


def spaced(patch: Patch) -> None:
    patch.setattr(
        generate, "json_reply", lambda value, status=200: Reply(status, json.dumps(value).encode(), wire.JSON)
    )


def headed_by(change: Callable[[bytes], bytes]) -> Plant:
    """The heads of unary answers are changed."""
    real = wire.reply_bytes
    return setting(generate, "reply_bytes", lambda *more, **named: change(real(*more, **named)))


def both(patch: Patch) -> None:
    """A chunked answer has a content-length, too."""
    real = wire.stream_head
    patch.setattr(generate, "stream_head", lambda *more: real(*more)[:-2] + b"content-length: 5\r\n\r\n")


def burst(patch: Patch) -> None:
    """Behind the first event everything is held back to the end."""
    real = generate._Answer._send
    held: list[tuple[Any, ...]] = []

    async def send(self: Any, value: dict[str, Any], sent: int, total: int) -> None:
        held.append((value, sent, total))
        if not sent or value["meta_info"]["finish_reason"]:
            for event in held:
                await real(self, *event)
            held.clear()

    patch.setattr(generate._Answer, "_send", send)


def growing(meta: dict[str, Any]) -> None:
    """What was generated counts as cached."""
    count = meta["completion_tokens"]
    meta.update(cached_tokens=count, cached_tokens_details={"device": count, "host": 0})


def all_cached(meta: dict[str, Any]) -> None:
    count = meta["prompt_tokens"] - 1
    meta.update(cached_tokens=count, cached_tokens_details={"device": count, "host": 0})


def versioned(meta: dict[str, Any]) -> None:
    meta["weight_version"] = "v9"
    for span in meta.get("weight_versions", ()):
        span["version"] = "v9"


def unseeded() -> Plant:
    """A seed means nothing: each time the tokens are others."""
    seeds = itertools.count()
    return parsing(lambda given: given | {"sampling_seed": next(seeds)})


def shifted(rows: list[Any]) -> list[Any]:
    """Each value is that of the token before."""
    values = [row[0] for row in rows]
    return [[value, *row[1:]] for value, row in zip([None, -0.5, *values[1:]], rows, strict=False)]


def prompts(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """The prompt's logprobs are changed, all rows together."""
    name = "input_token_logprobs"
    return metas(lambda meta: meta.get(name) and meta.update({name: change(meta[name])}))


def told(message: str) -> Reply:
    return wire.json_reply({"error": message}, 400)


def strict(patch: Patch) -> None:
    def check(body: Any) -> None:
        if "wibble" in body:
            raise WrongType("unknown field `wibble`")

    patch.setattr(contract, "check_contract", check)


def unchecked(*arguments: Any) -> None:
    """Whatever it is, it passes."""


def as_event(patch: Patch) -> None:
    patch.setattr(generate, "event", lambda payload: b"event: message\ndata: " + payload + b"\n\n")


def reverse_batch(patch: Patch) -> None:
    real = wire.json_reply
    patch.setattr(generate, "json_reply", lambda value: real(value[::-1] if isinstance(value, list) else value))


def lost_first(live: Live, unary: bool) -> bool:
    return not unary and live.emitted > 1


DEVIATIONS: list[tuple[str, Plant]] = [
    ("health", route("/health", Reply(200, b"OK", wire.TEXT))),
    ("health_generate", route("/health_generate", Reply(204, content_type=None))),
    ("ready", route("/ready", Reply(503, content_type=None))),
    ("model_info", route("/model_info", lambda value: value.pop("preferred_sampling_params"))),
    ("server_info", route("/server_info", lambda value: value.update(internal_states=[]))),
    ("models", route("/v1/models", lambda value: value["data"][0].update(max_model_len="2000"))),
    ("loads", route("/v1/loads", lambda value: value["loads"][0].pop("num_running_reqs"))),
    ("put_is_post", setting(control, "GENERATE_METHODS", ("POST",))),
    ("wrong_method", setting(control, "GENERATE_METHODS", ("POST", "PUT", "GET"))),
    ("unknown_path", lost),
    ("head_is_not_get", headed),
    ("trailing_slash", unslashed),
    ("abort_answers_empty", route("/abort_request", wire.json_reply({"status": "ok"}))),
    ("unary_head", charset),
    ("stream_head", setting(wire, "EVENT_STREAM", b"text/event-stream")),
    ("one_framing", headed_by(lambda head: re.sub(rb"(content-length: \d+\r\n)", rb"\1\1", head))),
    ("one_framing", both),
    ("head_lines", headed_by(lambda head: head.replace(b"\r\nserver:", b"\nserver:"))),
    ("head_lines", headed_by(lambda head: head.replace(b"HTTP/1.1", b"HTTP/1.0"))),
    ("keep_alive", headed_by(lambda head: head[:-2] + b"connection: close\r\n\r\n")),
    ("stream_is_not_held_back", burst),
    ("event_framing", as_event),
    ("done_ends_a_stream", setting(generate, "DONE", b"data: [END]\n\n")),
    ("compact_json", spaced),
    ("keep_alive", setting(http, "keeps_alive", lambda request: False)),
    ("connection_close", setting(http, "keeps_alive", lambda request: True)),
    ("unary_keys", answers(lambda value, live, unary: value.update(text=""))),
    ("meta_keys", metas(lambda meta: meta.setdefault("e2e_latency", 0.0))),
    ("meta_keys", metas(lambda meta: meta.pop("cached_tokens_details"))),
    ("counters", metas(lambda meta: meta.update(prompt_tokens=meta["prompt_tokens"] + 1))),
    ("counters", metas(lambda meta: meta.update(cached_tokens=meta["prompt_tokens"]))),
    ("counters", metas(lambda meta: meta.update(prompt_tokens=float(meta["prompt_tokens"])))),
    ("counters_grow", metas(lambda meta: meta.update(prompt_tokens=float(meta["prompt_tokens"])))),
    ("types", metas(lambda meta: meta.update(completion_tokens=float(meta["completion_tokens"])))),
    ("types", metas(lambda meta: meta.update(reasoning_tokens=False))),
    ("types", metas(lambda meta: meta.update(dp_rank="zero"))),
    ("types", finished(lambda value, meta: meta.update(e2e_latency="fast"))),
    ("types", finished(lambda value, meta: meta.update(e2e_latency=-1.0))),
    ("cached_tokens", metas(lambda meta: meta.update(cached_tokens_details={"device": 99, "host": 1}))),
    ("cached_tokens", metas(growing)),
    ("new_prompts_are_not_cached", metas(all_cached)),
    ("weight_version_is_the_servers", metas(versioned)),
    ("sampling_seed", unseeded()),
    ("weight_versions_tile", finished(lambda value, meta: meta["weight_versions"][0].update(end=5))),
    ("weight_versions_tile", finished(lambda value, meta: meta.update(weight_version="other"))),
    ("same_twice", moody()),
    ("unary_is_the_fold", answers(lambda value, live, unary: unary and value["output_ids"].reverse())),
    ("continuation", steps(lambda prompt, count, step: step._replace(token=(step.token + count) % 300))),
    ("continuation_streams", steps(lambda prompt, count, step: step._replace(token=(step.token + count) % 300))),
    ("prompt_token_ids", answers(lambda value, live, unary: not unary and value.pop("prompt_token_ids", 0))),
    ("unknown_field_is_ignored", strict),
    ("batch", reverse_batch),
    ("batch_stream", answers(lambda value, live, unary: value.pop("index", 0))),
    ("samples", setting(jobs, "_copies", lambda params: 1)),
    ("dialect", answers(lambda value, live, unary: value.update(output_ids=live.ids[-2:]))),
    ("dialect", finished(lambda value, meta: value["output_ids"].insert(0, 5))),
    ("dialect_is_declared", route("/server_info", lambda value: value.update(incremental_streaming_output=True))),
    ("counters_grow", answers(lambda value, live, unary: value["meta_info"].update(id=str(live.emitted)))),
    ("one_finish", metas(lambda meta: meta.update(finish_reason=meta["finish_reason"] or {}))),
    ("stream_interval", parsing(lambda given: given | {"stream_interval": 2})),
    (
        "input_logprobs_in_every_event",
        answers(
            lambda value, live, unary: (
                value["meta_info"].update(input_token_logprobs=[]) if lost_first(live, unary) else None
            )
        ),
    ),
    ("finish_length", finished(lambda value, meta: meta["finish_reason"].pop("length"))),
    ("finish_length", finished(lambda value, meta: meta.update(finish_reason="length"))),
    ("budget_of_zero", setting(engine, "budget", lambda model, prompt, limit: max(1, limit or 0))),
    ("budget_of_one", setting(engine, "budget", lambda model, prompt, limit: max(2, limit or 0))),
    ("default_budget", parsing(lambda given: {"max_new_tokens": 64} | given)),
    ("null_budget", setting(engine, "budget", lambda model, prompt, limit: 128 if limit is None else limit)),
    ("stop_token", finished(lambda value, meta: meta["finish_reason"].update(matched="27"))),
    ("output_logprobs", rows("output_token_logprobs", lambda row: row[:2])),
    ("no_logprobs_unasked", metas(lambda meta: meta.setdefault("output_token_logprobs", []))),
    ("logprob_start_len", rows("input_token_logprobs", lambda row: [-1.0, *row[1:]])),
    ("top_logprobs", rows("output_top_logprobs", lambda row: row[::-1])),
    ("top_logprobs", rows("output_top_logprobs", lambda row: [[entry[0], row[0][1], None] for entry in row])),
    ("top_logprobs", rows("output_top_logprobs", lambda row: [[row[0][0], -3, None], *row[1:]])),
    ("top_logprobs", rows("input_top_logprobs", lambda row: row and [[5.0, *entry[1:]] for entry in row])),
    ("top_logprobs", rows("input_top_logprobs", lambda row: row and [[-90.0, *entry[1:]] for entry in row])),
    ("prompt_logprobs_are_the_outputs", prompts(shifted)),
    ("prompt_logprobs_are_the_outputs", prompts(lambda rows: [rows[0], *([-1.0, *row[1:]] for row in rows[1:])])),
    ("token_ids_logprob", rows("output_token_ids_logprobs", lambda row: row[::-1])),
    ("token_ids_logprob", rows("output_token_ids_logprobs", lambda row: [[-7.0, *entry[1:]] for entry in row])),
    ("output_logprobs", metas(lambda meta: meta["finish_reason"] or meta.update(output_token_logprobs_length=1))),
    ("token_ids_logprob", metas(lambda meta: meta.pop("input_token_ids_logprobs", 0))),
    ("expert_rows", routed),
    ("experts_come_last", metas(lambda meta: meta.setdefault("routed_experts", ""))),
    ("rid_is_echoed", metas(lambda meta: meta.update(id=meta["id"] + "-0"))),
    ("rid_is_made", setting(MockWorker, "new_rid", lambda self: "request")),
    ("rids_of_a_batch", metas(lambda meta: meta.update(id=meta["id"].removesuffix("_1")))),
    ("live_rid_is_refused", welcoming),
    ("live_rid_is_refused_to_a_stream", welcoming),
    ("refuses_unknown_sampling_key", setting(contract, "check_contract", unchecked)),
    ("refuses_malformed_json", setting(contract, "bad_request_object", told)),
    ("refuses_no_prompt", setting(generate, "value_error", told)),
    ("refuses_negative_temperature", setting(jobs, "verify_sampling", unchecked)),
    ("refuses_logprob_start_beyond", setting(scheduler, "schedule", unchecked)),
    ("abort_a_stream", aborting(lambda name, rid: False)),
    ("abort_a_stream", aborting(lambda name, rid: name == rid, {"type": "abort", "message": "Aborted"})),
    ("abort_a_unary_request", aborting(lambda name, rid: name == rid, {"type": "stop", "matched": None})),
    ("abort_of_nobody", aborting(lambda name, rid: name.startswith(rid))),
    ("abort_of_a_mere_prefix", aborting(lambda name, rid: name.startswith(rid))),
    ("abort_by_prefix", aborting(lambda name, rid: name == rid)),
    ("abort_of_the_longer_name", aborting(lambda name, rid: name.startswith(rid[:-1]))),
    ("abort_all", route("/abort_request", control.EMPTY_OK)),
    ("disconnect_aborts", deaf),
    ("disconnect_aborts_a_unary_request", deaf),
    ("pause_and_continue", lambda patch: patch.delitem(control.ROUTES, "/pause_generation")),
    ("pause_and_continue", setting(scheduler.Scheduler, "pause", unchecked)),
    ("pause_and_continue", route("/continue_generation", lambda value: value.pop("status"))),
    ("flush_cache", lambda patch: patch.delitem(control.ROUTES, "/flush_cache")),
    ("flush_cache", metas(all_cached)),
    ("weight_version_update", lambda patch: patch.delitem(control.ROUTES, "/update_weight_version")),
    ("weight_version_update", metas(lambda meta: meta.update(weight_version="default"))),
]
#: These are seen only when there is a tokenizer.
TEXT_DEVIATIONS: list[tuple[str, Plant]] = [
    ("stop_string", answers(lambda value, live, unary: value.update(text=value["text"] + "x"))),
    ("texts_add_up", answers(lambda value, live, unary: unary or value.update(text=value["text"].strip()[:-1]))),
    ("text_in_logprobs", rows("output_token_logprobs", lambda row: [*row[:2], None])),
    (
        "ids_beat_text",
        setting(jobs.Reader, "_prompts", lambda self, body: ([[5] if "text" in body else body["input_ids"]], True)),
    ),
    ("min_new_tokens", parsing(lambda given: given | {"min_new_tokens": 0})),
]


@pytest.mark.parametrize(("name", "plant"), DEVIATIONS, ids=[f"{at}-{name}" for at, (name, _) in enumerate(DEVIATIONS)])
async def test_it_is_found(autojump_clock: trio.testing.MockClock, monkeypatch: Patch, name: str, plant: Plant) -> None:
    plant(monkeypatch)
    assert set(await broken(name)) == {name}


@pytest.mark.parametrize(("name", "plant"), TEXT_DEVIATIONS, ids=[name for name, _ in TEXT_DEVIATIONS])
async def test_it_is_found_in_text(
    autojump_clock: trio.testing.MockClock, monkeypatch: Patch, name: str, plant: Plant
) -> None:
    plant(monkeypatch)
    assert set(await broken(name, how=setup(skip_tokenizer_init=False))) == {name}


@pytest.mark.parametrize("dialect", ["incremental", "mixed"])
async def test_an_abort_echo_is_no_delta(
    autojump_clock: trio.testing.MockClock, monkeypatch: Patch, dialect: Any
) -> None:
    """The last event of a delta stream repeats everything."""
    finished(lambda value, meta: value.update(output_ids=[1] * meta["completion_tokens"]))(monkeypatch)
    found = await broken("dialect", "unary_keys", how=setup(dialect=dialect), dialect=dialect)
    assert set(found) == {"dialect"}


async def test_a_run_of_everything_finds_it_too(autojump_clock: trio.testing.MockClock, monkeypatch: Patch) -> None:
    """Without `only`, and no other check is misled by what is not its own."""
    aborting(lambda name, rid: name == rid)(monkeypatch)
    assert set(await broken()) == {"abort_by_prefix"}


async def test_a_missing_key(autojump_clock: trio.testing.MockClock) -> None:
    """A worker that lets everybody in."""
    assert set(await broken("key_is_required", api_key="k")) == {"key_is_required"}


def test_most_checks_can_fail() -> None:
    planted = {name for name, _ in (*DEVIATIONS, *TEXT_DEVIATIONS)}
    assert planted <= set(CHECKS)
    assert len(planted) > 60
