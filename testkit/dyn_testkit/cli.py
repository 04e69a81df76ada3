"""`dyn-mock-worker`: a mock SGLang worker as a process of its own."""

from __future__ import annotations

import json
from typing import Any, cast

import click
import trio

from dyn_relay.sockets import open_network
from dyn_testkit.engine import Model
from dyn_testkit.faults import Fault, FaultPlan, nth, parse_fault
from dyn_testkit.worker import Dialect, MockWorker, WorkerOptions


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 lets the system choose.")
@click.option("--dialect", type=click.Choice(["cumulative", "incremental", "mixed"]), default="cumulative")
@click.option("--tick", default=0.0, help="Seconds a forward pass takes; 0 is as fast as possible.")
@click.option("--tokens-per-tick", default=1, show_default=True)
@click.option("--stream-interval", default=1, show_default=True)
@click.option("--late-finish", is_flag=True, help="The finish comes in an event of its own.")
@click.option("--with-tokenizer", is_flag=True, help="Answers carry text; text prompts are taken.")
@click.option("--context-length", default=131072, show_default=True)
@click.option("--vocab-size", default=1024, show_default=True)
@click.option("--eos-rate", default=0.0, show_default=True, help="Probability of EOS at each token.")
@click.option("--model-path", default="mock/model", show_default=True)
@click.option("--weight-version", default="default", show_default=True)
@click.option("--preferred-sampling-params", default=None, help="JSON object.")
@click.option("--max-running-requests", type=int, default=None)
@click.option("--max-queued-requests", type=int, default=None)
@click.option("--api-key", default=None)
@click.option("--routed-experts", is_flag=True)
@click.option("--expert-mark", default=0, help="Added to every expert id.")
@click.option("--health-delay", default=0.0, show_default=True)
@click.option("--death-delay", default=0.0, show_default=True, help="Silence between a poisonous request and death.")
@click.option("--exact-abort", is_flag=True, help="/abort_request matches whole rids only.")
@click.option("--fault", "faults", multiple=True, help="N:WHAT@WHERE, the fault of request N (from 0). Repeatable.")
@click.option("--allow-header-faults", is_flag=True, help="Honour the header x-mock-fault: WHAT@WHERE.")
def main(host: str, port: int, dialect: str, faults: tuple[str, ...], **flags: Any) -> None:
    """A mock SGLang worker: a deterministic engine behind SGLang's HTTP API, with faults on demand.

    Prints "listening on URL" once it serves; a fault that kills the worker ends the process with status 137.
    """
    preferred = flags.pop("preferred_sampling_params")
    options = WorkerOptions(
        model=Model(
            vocab_size=flags.pop("vocab_size"),
            eos_rate=flags.pop("eos_rate"),
            context_length=flags.pop("context_length"),
        ),
        dialect=cast(Dialect, dialect),
        skip_tokenizer_init=not flags.pop("with_tokenizer"),
        abort_match="exact" if flags.pop("exact_abort") else "prefix",
        preferred_sampling_params=json.loads(preferred) if preferred else None,
        **flags,
    )
    plan = FaultPlan.of(*(_numbered(text) for text in faults))
    status = 137
    try:
        trio.run(_serve, host, port, options, plan)
    except* KeyboardInterrupt:
        status = 0
    raise SystemExit(status)


def _numbered(text: str) -> Fault:
    number, _, fault = text.partition(":")
    try:
        parsed = parse_fault(fault)
        return Fault(parsed.where, parsed.what, nth(int(number)))
    except ValueError as exc:
        raise click.BadParameter(f"{text!r}: {exc}", param_hint="--fault") from exc


async def _serve(host: str, port: int, options: WorkerOptions, plan: FaultPlan) -> None:
    async with open_network() as network, MockWorker.serve(network, host, port, options, plan) as worker:
        click.echo(f"listening on {worker.url}")
        await worker.dead()
