"""The same requests to a stock SGLang over HTTP and over its native gRPC, recorded for `tests/grpc`.

    PROGRAM=record.py bash tests/live/run.sh        # writes tests/grpc/recordings/stock-0.5.23.jsonl

One line an exchange: the body as HTTP was sent it, the message that says the same, all messages that came back with the
status, and HTTP's answer. The messages are made here, not by what the recordings test. Requests that kill a stock
engine are not sent.
"""

from __future__ import annotations

import http.client
import json
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import grpc
import trio
from google.protobuf.message import Message
from lab import FLAVOURS, Lab

from dyn_chaos.engines import StockServer
from dyn_relay.grpc import methods, sglang_pb2
from dyn_relay.grpc.methods import Method

OUT = Path(__file__).parents[1] / "grpc" / "recordings" / "stock-0.5.23.jsonl"
#: What of `bodies`, `texts` and `CONTROL` is kept of each flavour: everything of one, and what differs in the others.
RECORDED: dict[str, tuple[str, ...]] = {
    "grpc-text": (),
    "grpc-text-incremental": ("ids", "logprobs", "stop-string", "error-top-p", "error-of-scheduler"),
    "grpc": ("ids", "no-tokens", "logprobs", "error-top-p"),
}
#: Their streams say nothing that others' do not.
UNARY = ("sampling", "penalties", "seed", "routing", "json-schema", "regex", "ebnf")
PROMPT = [5, 6, 7, 8, 9]
SECONDS = 30.0
#: An engine aborts a rid two seconds after its stream has ended, whoever has it then.
AFTER_RID = 2.5

Json = dict[str, Any]
Call = tuple[Method[Any, Any], Message]


def bodies() -> Iterator[tuple[str, Json]]:
    """Requests for `/generate`, by name, each for both modes."""

    def greedy(tokens: int = 3, **more: Any) -> Json:
        return {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **more}}

    yield "ids", greedy()
    yield "rid", greedy() | {"rid": "mine"}
    yield "no-tokens", greedy(0)
    yield "stop-token", greedy(20, stop_token_ids=[717])
    yield "logprobs", greedy() | {"return_logprob": True}
    yield "logprobs-of-prompt", greedy() | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    yield "logprobs-of-its-end", greedy() | {"return_logprob": True, "logprob_start_len": 3}
    yield "sampling", greedy(4, top_p=0.9, top_k=20, min_p=0.05, min_new_tokens=2, ignore_eos=True)
    yield "penalties", greedy(4, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.3)
    yield "seed", greedy(2, sampling_seed=2**40)
    yield "routing", greedy(2) | {"priority": 3, "session_id": "s", "routing_key": "k", "routed_dp_rank": 0}
    yield "error-top-p", greedy(top_p=2.5)
    yield "error-budget", greedy(5000)
    yield "error-empty", greedy() | {"input_ids": []}
    yield "error-rank", greedy() | {"routed_dp_rank": 5}
    yield "error-lora", greedy() | {"lora_path": "nobody"}
    yield "error-thinking", greedy() | {"max_thinking_tokens": 5}
    yield "error-of-scheduler", greedy() | {"return_logprob": True, "logprob_start_len": 50}


def texts() -> Iterator[tuple[str, Json]]:
    """More of them, for an engine with a tokenizer."""

    def greedy(tokens: int, **more: Any) -> Json:
        return {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **more}}

    yield "stop-string", greedy(20, stop=["7N7N", "x"])
    yield "json-schema", greedy(12, json_schema='{"type": "object", "properties": {}, "additionalProperties": false}')
    yield "regex", greedy(12, regex="[ab]{3}")
    yield "ebnf", greedy(12, ebnf='root ::= "yes" | "no"')
    yield "error-schema", greedy(3, json_schema="{nonsense")
    yield "not-ascii", greedy(6) | {"input_ids": [131, 106, 200, 201, 202]}
    yield "text", {"text": "caf\u00e9 ok", "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
    told = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    yield "text-logprobs", {"text": "Hello", "sampling_params": {"temperature": 0, "max_new_tokens": 2}, **told}


#: All else: what gRPC is asked, and the request to HTTP that means the same.
CONTROL: dict[str, tuple[Call, tuple[str, str, Json | None]]] = {
    "model-info": ((methods.GET_MODEL_INFO, sglang_pb2.GetModelInfoRequest()), ("GET", "/model_info", None)),
    "models": ((methods.LIST_MODELS, sglang_pb2.ListModelsRequest()), ("GET", "/v1/models", None)),
    "load": ((methods.GET_LOAD, sglang_pb2.GetLoadRequest()), ("GET", "/v1/loads", None)),
    "load-nobody": ((methods.GET_LOAD, sglang_pb2.GetLoadRequest(dp_rank=5)), ("GET", "/v1/loads?dp_rank=5", None)),
    "tokenize": (
        (methods.TOKENIZE, sglang_pb2.TokenizeRequest(text="caf\u00e9")),
        ("POST", "/tokenize", {"prompt": "caf\u00e9"}),
    ),
    "detokenize": (
        (methods.DETOKENIZE, sglang_pb2.DetokenizeRequest(tokens=[274, 313, 100])),
        ("POST", "/detokenize", {"tokens": [274, 313, 100]}),
    ),
    "flush": ((methods.FLUSH_CACHE, sglang_pb2.FlushCacheRequest()), ("POST", "/flush_cache", None)),
    "abort-nobody": ((methods.ABORT, sglang_pb2.AbortRequest(rid="x")), ("POST", "/abort_request", {"rid": "x"})),
    "abort-nothing": ((methods.ABORT, sglang_pb2.AbortRequest()), ("POST", "/abort_request", {"rid": ""})),
    "pause": (
        (methods.PAUSE_GENERATION, sglang_pb2.PauseGenerationRequest(mode="retract")),
        ("POST", "/pause_generation", {"mode": "retract"}),
    ),
    "continue": (
        (methods.CONTINUE_GENERATION, sglang_pb2.ContinueGenerationRequest()),
        ("POST", "/continue_generation", {}),
    ),
    "weights-nowhere": (
        (methods.UPDATE_WEIGHTS_FROM_DISK, sglang_pb2.UpdateWeightsRequest(model_path="/nowhere")),
        ("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}),
    ),
    "stop-profile": ((methods.STOP_PROFILE, sglang_pb2.StopProfileRequest()), ("POST", "/stop_profile", None)),
}


def message(body: Json, *, text: bool) -> Call:
    """A body as a message. `text`: the engine has a tokenizer, so that HTTP always answers with text."""
    body = dict(body)
    sampling = dict(body.pop("sampling_params"))
    request = sglang_pb2.TextGenerateRequest() if "text" in body else sglang_pb2.GenerateRequest()
    if "input_ids" in body:
        request.input_ids.extend(body.pop("input_ids"))
        if text:
            request.return_text = True
    request.sampling_params.SetInParent()
    if "sampling_seed" in sampling:
        sampling["seed"] = sampling.pop("sampling_seed")
    for name, value in sampling.items():
        if isinstance(value, list):
            getattr(request.sampling_params, name).extend(value)
        elif name in ("json_schema", "regex", "ebnf"):
            setattr(request.sampling_params.guided_decoding, name, value)
        else:
            setattr(request.sampling_params, name, value)
    for name, value in body.items():
        setattr(request, name, value)
    return methods.TEXT_GENERATE if "text" in body else methods.GENERATE, request


def by_grpc(channel: grpc.Channel, call: Call) -> Json:
    """What came back."""
    method, request = call
    made = (channel.unary_stream if method.streams else channel.unary_unary)(method.path)
    data = request.SerializeToString()
    got: list[bytes] = []
    asked = {"method": method.path.rpartition("/")[2], "request": data, "messages": got}
    try:
        if method.streams:
            got += made(data, timeout=SECONDS)
        else:
            got.append(made(data, timeout=SECONDS))
    except grpc.RpcError as error:
        return {**asked, "code": error.code().name, "details": error.details()}
    return {**asked, "code": "OK", "details": ""}


def by_http(url: str, method: str, path: str, body: Json | None) -> Json:
    """What came back."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)
    head = {} if body is None else {"content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body).encode(), head)
    answer = connection.getresponse()
    asked = {"method": method, "path": path, "body": body}
    kind = answer.getheader("content-type", "")
    return {**asked, "status": answer.status, "type": kind, "answer": answer.read().decode()}


def exchanges(engine: StockServer, flavour: str) -> Iterator[Json]:
    """Each request to the engine over both."""
    text, kept = FLAVOURS[flavour].text, RECORDED[flavour]
    with grpc.insecure_channel(engine.grpc.removeprefix("grpc://")) as channel:
        for name, body in [*bodies(), *(texts() if text else ())]:
            if kept and name not in kept:
                continue
            yield {"case": f"{flavour}/unary/{name}"} | both(channel, engine.url, named(body, "unary"), text=text)
            streaming = {**named(body, "stream"), "stream": True}
            while name not in UNARY:  # an event may have two tokens, and then the other answer has more events
                seen = both(channel, engine.url, streaming, text=text)
                if len(seen["grpc"]["messages"]) == seen["http"]["answer"].count('"meta_info"'):
                    yield {"case": f"{flavour}/stream/{name}"} | seen
                    break
        for name, (call, request) in CONTROL.items() if not kept else ():
            yield {"case": f"{flavour}/{name}", "grpc": by_grpc(channel, call), "http": by_http(engine.url, *request)}


def named(body: Json, mode: str) -> Json:
    """With a rid of its own, if it has any."""
    return body | {"rid": f"{body['rid']}-{mode}"} if "rid" in body else body


def both(channel: grpc.Channel, url: str, body: Json, *, text: bool) -> Json:
    """Its answers, the cache empty before each."""
    by_http(url, "POST", "/flush_cache?timeout=30", None)
    over = by_grpc(channel, message(body, text=text))
    if "rid" in body:
        time.sleep(AFTER_RID)
    by_http(url, "POST", "/flush_cache?timeout=30", None)
    return {"grpc": over, "http": by_http(url, "POST", "/generate", body)}


def written(exchange: Json, model: Path) -> str:
    """A line, messages in Base64; without this machine's path to `model`, for which a name of its length stands."""
    path, name = str(model), "/models/".ljust(len(str(model)), "x")

    def spelled(data: bytes) -> str:
        return b64encode(data.replace(path.encode(), name.encode())).decode()

    over = exchange["grpc"]
    over |= {"request": spelled(over["request"]), "messages": [spelled(each) for each in over["messages"]]}
    return json.dumps(exchange).replace(path, name)


async def record(home: Path, flavours: Sequence[str]) -> list[str]:
    """The lines."""
    lines: list[str] = []
    for flavour in flavours:
        async with trio.open_nursery() as nursery:
            lab = Lab.of(home, flavour, nursery)
            [engine] = await lab.engines("a")
            seen = await trio.to_thread.run_sync(
                lambda engine=engine, flavour=flavour: list(exchanges(engine, flavour))
            )
            lines += [written(each, lab.stock.model) for each in seen]
            await lab.engines("")
            nursery.cancel_scope.cancel()
    return lines


@click.command()
@click.option("--home", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=OUT)
def main(home: Path, out: Path) -> None:
    """Record."""
    lines = trio.run(record, home, RECORDED)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{line}\n" for line in lines))
    click.echo(f"{len(lines)} exchanges in {out}")


if __name__ == "__main__":
    main()
