"""`dyn-mock-worker`: a mock SGLang worker as a process of its own."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, cast

import click
import msgspec
import trio

from dyn_relay.sockets import open_network
from dyn_testkit.engine import Model
from dyn_testkit.faults import GRPC_ONLY, Fault, FaultPlan, nth, parse_fault
from dyn_testkit.tokenizer import PLAIN, TOKENIZERS, Tokenizer

try:
    from dyn_testkit.worker import Dialect, MockWorker, WorkerOptions
    from dyn_testkit.worker.kv_cache import KvOptions
except ModuleNotFoundError as missing:
    if missing.name != "h11":  # the only package that the proxy itself does without
        raise
    raise SystemExit("dyn-mock-worker needs h11: pip install '.[testkit]' in a checkout") from None

#: How `--fault` spells what happens and where; numbers beside these words: a status, a code behind a word of
#: `NUMBERED`, and a token.
NUMBERED = ("abort", "delay", "goaway", "grpc", "rst_stream")
OF_GRPC = tuple(sorted(kind.value for kind in GRPC_ONLY if kind.value not in ("grpc", "rst_stream")))
WHAT = ("kill", "reset", "close", "stall", "garbage", "empty_200", "comments", "abort", *OF_GRPC)
WHERE = ("head", "bootstrap", "transfer", "transferred", "last_token", "finish", "last_chunk", "done")
_CODES = ", ".join(f"{word}CODE" for word in NUMBERED)
_WORDS = f"WHAT: {', '.join(WHAT)}, {_CODES}, or a status; WHERE: a token (0: after the head), {', '.join(WHERE)}"
_FAULT = re.compile(
    rf"(\d+):((?:{'|'.join(WHAT)}|(?:{'|'.join(NUMBERED)})\d+|\d{{3}})@(?:{'|'.join(WHERE)}|\d+))", re.ASCII
)


def _fault(text: str) -> Fault:
    """N:WHAT@WHERE."""
    spelled = _FAULT.fullmatch(text)
    if spelled is None:
        raise click.BadParameter(f"{text!r} is not N:WHAT@WHERE. {_WORDS}")
    try:
        parsed = parse_fault(spelled[2])
    except ValueError as exc:
        raise click.BadParameter(f"{text!r}: {exc}") from None
    return Fault(parsed.where, parsed.what, nth(int(spelled[1])))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise click.BadParameter(f"{text!r} is not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise click.BadParameter(f"{text!r} is not a JSON object")
    return value


def _kv_options(text: str) -> KvOptions:
    given = _json_object(text)
    unknown = sorted(given.keys() - KV_KEYS)
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r}: no such option; there are {', '.join(KV_KEYS)}")
    try:
        return msgspec.convert(given, KvOptions)
    except msgspec.ValidationError as exc:
        raise click.BadParameter(f"{text!r}: {exc}") from None


def tokenizer_of(with_tokenizer: bool, name: str | None) -> Tokenizer | None:
    """The tokenizer that these two options say; None: it is skipped. A name is enough."""
    return TOKENIZERS[name or "plain"] if with_tokenizer or name else None


KV_KEYS = tuple(field.name for field in dataclasses.fields(KvOptions))
_AT_LEAST_0, _AT_LEAST_1, _SECONDS = click.IntRange(0), click.IntRange(1), click.FloatRange(0)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 lets the system choose.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=None, help="Serve gRPC there, too; 0 as above.")
@click.option("--dialect", type=click.Choice(["cumulative", "incremental", "mixed"]), default="cumulative")
@click.option("--tick", type=_SECONDS, default=0.0, help="Seconds a forward pass takes; 0 is as fast as possible.")
@click.option("--tokens-per-tick", type=_AT_LEAST_1, default=1, show_default=True)
@click.option("--stream-interval", type=_AT_LEAST_1, default=1, show_default=True)
@click.option("--late-finish", is_flag=True, help="The finish comes in an event of its own.")
@click.option("--with-tokenizer", is_flag=True, help="Answers carry text; text prompts are taken.")
@click.option("--tokenizer", type=click.Choice(list(TOKENIZERS)), default=None, help="Which one; plain if not said.")
@click.option("--context-length", type=_AT_LEAST_1, default=131072, show_default=True)
@click.option("--vocab-size", type=_AT_LEAST_1, default=1024, show_default=True)
@click.option(
    "--eos-rate", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Probability of EOS at each token."
)
@click.option("--model-path", default="mock/model", show_default=True)
@click.option("--weight-version", default="default", show_default=True)
@click.option(
    "--preferred-sampling-params", type=_json_object, metavar="JSON", help="An object, as a model's own defaults."
)
@click.option("--max-running-requests", type=_AT_LEAST_1, default=None)
@click.option("--max-queued-requests", type=_AT_LEAST_0, default=None)
@click.option("--api-key", default=None)
@click.option("--dp-size", type=_AT_LEAST_1, default=1, show_default=True)
@click.option(
    "--disaggregation-mode",
    "disaggregation",
    type=click.Choice(["null", "prefill", "decode"]),
    default="null",
    help="One leg of a prefill/decode pair.",
)
@click.option(
    "--disaggregation-bootstrap-port",
    "bootstrap_port",
    type=click.IntRange(0, 65535),
    default=8998,
    show_default=True,
    help="Of a prefill worker; 0 lets the system choose, and /server_info tells.",
)
@click.option("--transfer-ticks", type=_AT_LEAST_0, default=1, help="Forward passes that handing over a prompt takes.")
@click.option("--bootstrap-timeout", type=_SECONDS, default=300.0, show_default=True)
@click.option("--waiting-timeout", type=_SECONDS, default=300.0, show_default=True)
@click.option("--heartbeat", type=_SECONDS, default=5.0, show_default=True, help="Of a decode leg that waits; 0: none.")
@click.option("--routed-experts", is_flag=True)
@click.option("--indexer-topk", is_flag=True)
@click.option("--expert-mark", type=click.IntRange(0, 2**30), default=0, help="Added to every number of these rows.")
@click.option("--early-rows", is_flag=True, help="Each event has these rows, not the finish alone.")
@click.option("--ignore-seeds", is_flag=True, help="No deterministic inference: every request has a draw of its own.")
@click.option("--health-delay", type=_SECONDS, default=0.0, show_default=True)
@click.option(
    "--death-delay",
    type=_SECONDS,
    default=0.0,
    show_default=True,
    help="Silence between a poisonous request and death.",
)
@click.option(
    "--kv-events",
    type=_kv_options,
    metavar="JSON",
    help="Publish the prefix cache over ZeroMQ; an object with any of " + ", ".join(KV_KEYS) + ".",
)
@click.option("--exact-abort", is_flag=True, help="/abort_request matches whole rids only.")
@click.option(
    "--fault",
    "faults",
    type=_fault,
    multiple=True,
    metavar="N:WHAT@WHERE",
    help=f"The fault of request N (from 0); repeat. {_WORDS}.",
)
@click.option("--allow-header-faults", is_flag=True, help="Honour the header x-mock-fault: WHAT@WHERE.")
def main(host: str, port: int, dialect: str, faults: tuple[Fault, ...], **flags: Any) -> None:
    """A mock SGLang worker: a deterministic engine behind SGLang's HTTP API, with faults on demand.

    Prints "listening on URL" once it serves; a fault that kills the worker ends the process with status 137.
    """
    tokenizer = tokenizer_of(flags.pop("with_tokenizer"), flags.pop("tokenizer"))
    options = WorkerOptions(
        model=Model(
            vocab_size=flags.pop("vocab_size"),
            eos_rate=flags.pop("eos_rate"),
            context_length=flags.pop("context_length"),
        ),
        dialect=cast(Dialect, dialect),
        skip_tokenizer_init=tokenizer is None,
        tokenizer=tokenizer or PLAIN,
        deterministic=not flags.pop("ignore_seeds"),
        abort_match="exact" if flags.pop("exact_abort") else "prefix",
        **flags,
    )
    status, refused = 137, None
    try:
        refused = trio.run(_serve, host, port, options, FaultPlan.of(*faults))
    except* KeyboardInterrupt:
        status = 0
    if refused is not None:
        raise click.ClickException(f"cannot listen on {host}:{port}: {refused}")
    raise SystemExit(status)


async def _serve(host: str, port: int, options: WorkerOptions, plan: FaultPlan) -> OSError | None:
    """Serve until the worker is dead; gives the reason if it cannot listen."""
    async with open_network() as network:
        try:
            async with MockWorker.serve(network, host, port, options, plan) as worker:
                click.echo(f"listening on {worker.url}")
                if worker.grpc_port is not None:
                    click.echo(f"listening on {worker.grpc_url}")
                await worker.dead()
        except OSError as exc:
            return exc
    return None
