"""What would become of a request, without sending it anywhere: for people (`dyn-relay explain`) and for programs."""

from __future__ import annotations

from dataclasses import asdict, replace

from msgspec import Raw

from dyn_relay.config import Config
from dyn_relay.formats.base import Explanation, Format, NativeRequest, Verdict
from dyn_relay.formats.traits import Traits
from dyn_relay.relay.budget import limited, too_long
from dyn_relay.relay.downstream import MIGRATABLE_HEADER, protection

_LIMIT = "an option of the proxy"


def explained(format: Format, config: Config, request: NativeRequest, traits: Traits, after: int) -> Explanation:
    """The format's explanation, within the limits that the proxy sets itself. Raises `ValueError`: "FIELD: ..."."""

    def within(verdict: Verdict, tokens: int) -> Verdict:
        return limited(verdict, config, tokens, len(request.body))

    found = format.explain(request, traits, after, within, split=config.split_batches)
    verdict = within(found.verdict, found.prompt_tokens)
    if verdict != found.verdict:
        rule = f"`{verdict.reason}` is {getattr(config, verdict.reason)}"
        refused = replace(found, verdict=verdict, rule=rule, because=_LIMIT)
        return replace(refused, instead="", continuation=None, stand_ins=(), needs=())
    if found.continuation is not None and too_long(config, found.prompt_tokens + after):
        instead = "it would fail loudly, with the reason migration_max_seq_len"
        return replace(found, continuation=None, instead=instead, stand_ins=(), needs=())
    return found


def described(found: Explanation, traits: Traits, worker: str | None, after: int) -> dict[str, object]:
    """An explanation as a JSON object. `worker`: whose traits they are; None: those of a stock one."""
    sent = found.continuation
    return {
        "header": {MIGRATABLE_HEADER.decode(): protection(found.verdict).decode()},
        "migratable": found.verdict.migratable,
        "reason": found.verdict.reason,
        "rule": found.rule,
        "because": found.because,
        "lacks": found.lacks,
        "answer": found.answer and {"status": found.answer.status, "body": found.answer.body.decode()},
        "split": None if found.index is None else {"index": found.index, "answers": found.answers},
        "worker": {"url": worker, **asdict(traits)},
        "depends": found.depends,
        "after": after,
        "instead": found.instead,
        "continuation": sent and {"method": sent.method, "path": sent.path, "body": Raw(sent.body)},
        "stand_ins": found.stand_ins,
        "needs": found.needs,
    }
