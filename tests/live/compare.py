"""Each recorded request to a stock engine directly, through PyPI's `sglang-router`, and through us: what differs.

    make compare        # writes docs/compatibility.md

The requests are those of `tests/contract/captures`: texts and token ids, batches, n, logprob options, PUT, fields that
nobody knows, every error. What an engine measures is left out, and what it samples by chance; logprobs are compared to
three digits. Requests that kill a stock engine are not sent.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import trio
from answers import DOCUMENTED, MEASURED, Target, address, ask, differences, freed, told
from lab import Lab
from peers import ROUTER_REQUIREMENT, python_with

from dyn_chaos.processes import Child, free_port

ROOT = Path(__file__).parents[2]
CAPTURES = ROOT / "tests" / "contract" / "captures"
#: (flavour of the engine, folder of recordings that were made with one like it)
RUNS = (("cumulative", "cumulative"), ("text", "tokenizer"))
PREFIXES = ("s_", "u_", "err_", "put_", "get_generate", "head_", "options_", "not_found")
#: These kill a stock engine (0.5.23), or wedge it.
DEADLY = ("neg_id", "oov_id", "err_logprob_start_neg", "err_top_logprobs_huge")
#: Sampled by chance.
CHANCE = ("sampled", "no_sampling_params", "n2", "n3")


def requests(folder: str) -> Iterator[tuple[str, bytes]]:
    """The recorded requests, by name."""
    for path in sorted((CAPTURES / folder).glob("*.req")):
        name = path.stem
        if name.startswith(PREFIXES) and not name.endswith(DEADLY):
            yield f"{folder}/{name}", path.read_bytes()


def renamed(request: bytes, suffix: str) -> bytes:
    """With other rids: an engine aborts a rid two seconds after its stream has ended, whoever has it then."""
    head, _, body = request.partition(b"\r\n\r\n")
    try:
        value = json.loads(body)
    except ValueError:
        return request
    rids = value.get("rid") if isinstance(value, dict) else None
    for rid in rids if isinstance(rids, list) else [rids]:
        if isinstance(rid, str) and rid:
            quoted = json.dumps(rid).encode()
            body = body.replace(quoted, quoted[:-1] + suffix.encode() + b'"')
    head = re.sub(rb"(?i)content-length: *\d+", b"Content-Length: %d" % len(body), head)
    return head + b"\r\n\r\n" + body


async def _compare(home: Path, router: str) -> list[tuple[str, str, list[str]]]:
    """(request, through whom, differences), for all requests and both."""
    found: list[tuple[str, str, list[str]]] = []
    logs = home / "logs"
    for flavour, folder in RUNS:
        async with trio.open_nursery() as nursery:
            lab = Lab.of(home, flavour, nursery)
            [engine] = await lab.engines("a")
            relay = await lab.relay(nursery, [engine], "compare", ())
            port, spare = free_port(), free_port()
            argv = [
                *(router, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
                *("--policy", "round_robin", "--worker-startup-check-interval", "1", "--prometheus-host", "127.0.0.1"),
                *("--prometheus-port", str(spare), "--worker-urls", engine.url),
            ]
            log = logs / f"router-{flavour}.log"
            ready = re.compile("(?i)starting server|listening|started")
            await Child.start(nursery, f"router-{flavour}", argv, log=log, ready=ready)
            await trio.sleep(3)  # it says that it has started before it knows its worker
            direct = Target("direct", *address(engine.url))
            others = [Target("ours", *address(relay.url)), Target("sglang-router", "127.0.0.1", port)]
            for name, request in requests(folder):
                by_chance = any(word in name for word in CHANCE)
                answers = {}
                for target in (direct, *others):
                    suffix = f"-{target.name}"
                    response = await ask(target, renamed(request, suffix))
                    answers[target.name] = told(response, suffix, by_chance=by_chance)
                    if target.name == "ours" and "/generate" in request.decode("latin-1").split("\r\n")[0]:
                        header = response.header(DOCUMENTED)
                        if header is None:
                            answers["ours"]["headers"][DOCUMENTED] = "missing"
                found += [(name, one.name, list(differences(answers["direct"], answers[one.name]))) for one in others]
                click.echo(f"{name}: ours {len(found[-2][2])}, sglang-router {len(found[-1][2])}")
            for stream in (True, False):
                for target in (direct, *others):
                    seconds = await freed(target, direct, stream=stream)
                    what = f"{folder}/a client that leaves, {'streaming' if stream else 'unary'}"
                    took = "still at work after 60 s" if seconds is None else f"free after {seconds:.1f} s"
                    found.append((what, target.name, [took]))
                    click.echo(f"{what}, {target.name}: {took}")
            await lab.engines("")
            nursery.cancel_scope.cancel()
    return found


def page(found: list[tuple[str, str, list[str]]]) -> str:
    """The page: our differences, all of them; the other router's, by kind."""
    compared = [entry for entry in found if "a client that leaves" not in entry[0]]
    ours = [(name, differing) for name, who, differing in compared if who == "ours" and differing]
    theirs: dict[str, dict[str, str]] = {}
    for name, who, differing in compared:
        for one in differing if who == "sglang-router" else ():
            what, _, how = one.partition(": ")
            theirs.setdefault(what, {})[name] = how
    total = len(compared) // 2
    text = _HEAD.format(total=total, ours=len(ours), header=DOCUMENTED)
    text += "## Ours\n\n"
    text += "".join(f"- `{name}`: {'; '.join(differing)}\n" for name, differing in ours) or "None.\n"
    count = len({name for names in theirs.values() for name in names})
    beyond = len({name for what, names in theirs.items() if not what.startswith("headers.") for name in names})
    text += (
        f"\n## `sglang-router` 0.3.2\n\n{count} of {total} requests are answered otherwise, {beyond} of them in more "
    )
    text += f"than headers: {_WHY}\n\n"
    text += "| what is not the engine's | requests | one of them | how |\n|---|---|---|---|\n"
    for what, names in sorted(theirs.items(), key=lambda item: (-len(item[1]), item[0])):
        name, how = next(iter(names.items()))
        text += f"| {what} | {len(names)} | `{name}` | {how.replace('|', chr(92) + '|')} |\n"
    text += "\n## A client that leaves\n\n| | engine |\n|---|---|\n"
    for name, who, took in found:
        if "a client that leaves" in name:
            text += f"| {name}, {who} | {took[0]} |\n"
    return text


_HEAD = """# Compatibility

Made by `make compare` (`tests/live/compare.py`): the {total} requests of `tests/contract/captures` (token ids, texts,
batches, `n`, logprob options, PUT, fields that nobody knows, every error) to a stock SGLang 0.5.23 on the CPU directly,
through us, and through PyPI's `sglang-router` 0.3.2. Compared are status, end-to-end headers, and bodies: of a stream
the last event of each answer, errors, and the end. Left out is what an engine measures ({measured}),
what it samples by chance, and rids that nobody chose; logprobs are compared to three digits.

Through us {ours} answers differ, but for the header `{header}`, which every answer has.

""".replace("{measured}", ", ".join(f"`{name}`" for name in sorted(MEASURED)))


_WHY = """it reads each request into a type of its own and writes it anew, so what that type does not know is lost or
refused (422, in its own words, as plain text), numbers are spelled otherwise, and each answer gets its CORS headers."""


@click.command()
@click.option("--home", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "docs" / "compatibility.md")
def main(home: Path, out: Path) -> None:
    """Exits with 1 if an answer of ours differs."""
    found = trio.run(_compare, home, python_with(ROUTER_REQUIREMENT))
    out.write_text(page(found))
    sys.exit(any(differing for name, who, differing in found if who == "ours" and "leaves" not in name))


if __name__ == "__main__":
    main()
