"""The page `docs/fields.md`: every field of the contract, what becomes of it, and the tests that show it.

    python -m tests.fields > docs/fields.md

The fields are the testkit's (`dyn_testkit.worker.fields`), what becomes of them is the proxy's own
(`dyn_relay.formats.sglang.fields`), and which tests show it is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dyn_relay.formats.sglang import fields as fates
from dyn_relay.formats.sglang.answer import RULES, Rule
from dyn_testkit.worker import fields

UNIT = "tests/unit/sglang/test_sglang_"
FIELDS = f"{UNIT}fields.py::"
RECORDED = "tests/relay/test_recordings.py::test_a_streams_client_gets_the_recorded_bytes"
RECORDED_UNARY = "tests/relay/test_recordings.py::test_a_unary_client_gets_the_recorded_unary_answer"


@dataclass(frozen=True)
class Section:
    """One table of the page."""

    title: str
    text: str
    names: tuple[str, ...]
    becomes: Callable[[str], str]
    #: The tests of a field, as `file::test`, all its parameters if none is named.
    shown: Callable[[str], tuple[str, ...]]


#: Beside the sweeps over all fields.
REQUEST: dict[str, tuple[str, ...]] = {
    "rid": (f"{UNIT}bodies.py::test_the_name_that_the_relay_chooses",),
    "text": (f"{FIELDS}test_a_text_prompts_ids_are_asked_for", "tests/relay/test_texts.py::test_killed_at_every_token"),
    "input_ids": (f"{UNIT}kills.py::test_anything_goes", f"{UNIT}admission.py::test_poison"),
    "logprob_start_len": (f"{UNIT}bodies.py::test_logprob_start", f"{UNIT}admission.py::test_poison"),
    "top_logprobs_num": (f"{UNIT}kills.py::test_every_position", f"{UNIT}admission.py::test_poison"),
    "stream": (f"{FIELDS}test_a_unary_client_is_streamed_for",),
    "return_prompt_token_ids": (f"{FIELDS}test_a_text_prompts_ids_are_asked_for",),
    "return_routed_experts": (f"{UNIT}finish.py::test_what_only_the_engine_has",),
    "return_indexer_topk": (f"{UNIT}finish.py::test_what_only_the_engine_has",),
}
SAMPLING: dict[str, tuple[str, ...]] = {
    "max_new_tokens": (f"{UNIT}bodies.py::test_budget_is_resolved", f"{UNIT}bodies.py::test_saturation"),
    "min_new_tokens": (f"{UNIT}bodies.py::test_saturation",),
    "stream_interval": (f"{FIELDS}test_a_unary_client_is_streamed_for", f"{UNIT}bodies.py::test_stream_interval"),
    "stop": (f"{UNIT}admission.py::test_stop_strings", "tests/relay/test_texts.py::test_a_stop_string_at_every_split"),
    "stop_token_ids": (f"{UNIT}finish.py::test_stop_token_delivered",),
}
ANSWER: dict[str, tuple[str, ...]] = {
    "text": ("tests/relay/test_texts.py::test_killed_at_every_token", "tests/relay/test_texts.py::test_dialects"),
    "output_ids": (f"{UNIT}kills.py::test_every_position", f"{UNIT}kills.py::test_anything_goes"),
    "meta_info": (f"{UNIT}rebase.py::test_order_and_unknown_fields_survive",),
    "prompt_token_ids": (f"{UNIT}rebase.py::test_prompt_token_ids",),
    "index": (f"{RECORDED}[cumulative/s_batch2_n2]", f"{UNIT}ends.py::test_choices_of_a_batch_pass_with_their_errors"),
    "error": (f"{UNIT}ends.py::test_errors_in_a_stream", f"{UNIT}ends.py::test_errors_for_a_unary_client"),
}
META: dict[str, tuple[str, ...]] = {
    "prompt_tokens": (f"{UNIT}ends.py::test_a_continuation_of_another_prompt",),
    "weight_versions": (f"{UNIT}rebase.py::test_weight_versions", f"{UNIT}versions.py::test_a_living_engine_knows"),
    "response_sent_to_client_ts": (f"{UNIT}rebase.py::test_times_are_ours_after_a_cut",),
    "spec_accept_rate": (f"{UNIT}rebase.py::test_ratios",),
    "spec_accept_length": (f"{UNIT}rebase.py::test_ratios",),
}
#: What has no name of its own.
ANY: dict[str, tuple[str, tuple[str, ...]]] = {
    "(unknown, a list)": (
        "joined if it has one element a token in each attempt; else the last attempt's if it is as long as it was; "
        "else the answer fails loudly (`meta_info`)",
        (f"{UNIT}kills.py::test_unknown_rows", f"{UNIT}lineup.py::test_unknown_rows_of_which_the_first_are_missing"),
    ),
    "(unknown, a string of more than 256 bytes)": (
        "the last attempt's if it is as long as it was, else the answer fails loudly (`meta_info`)",
        (f"{UNIT}lineup.py::test_unknown_rows_of_which_the_first_are_missing",),
    ),
    "(unknown, anything else)": ("the last attempt's", (f"{UNIT}lineup.py::test_unknown_states",)),
    "(NaN, infinities, nulls anywhere)": ("as the worker spelled them", (f"{UNIT}nonfinite.py::test_they_survive",)),
}
#: By what becomes of them.
OF_RULE: dict[Rule, tuple[str, ...]] = {
    Rule.FIRST: (f"{UNIT}rebase.py::test_prompt_metadata_is_the_first_attempts_newest",),
    Rule.ROWS: (
        f"{UNIT}rebase.py::test_rows_that_a_continuation_does_not_have",
        f"{UNIT}rebase.py::test_rows_are_joined",
    ),
}
FINISH: dict[str, tuple[str, ...]] = {
    "type": (f"{UNIT}finish.py::test_budget_spent", f"{UNIT}finish.py::test_stop_token_delivered"),
    "length": (f"{UNIT}bodies.py::test_the_length_at_the_context_limit",),
}
_UNARY_ERRORS = f"{UNIT}ends.py::test_errors_for_a_unary_client"
ERROR: dict[str, tuple[str, ...]] = {
    "message": (f"{RECORDED}[cumulative/s_err_max_neg]", f"{RECORDED_UNARY}[cumulative/s_err_max_neg]", _UNARY_ERRORS),
    "type": (f"{RECORDED}[cumulative/s_err_max_neg]", _UNARY_ERRORS),
    "code": (f"{RECORDED}[cumulative/s_err_max_neg]", _UNARY_ERRORS, f"{UNIT}ends.py::test_errors_in_a_stream"),
    "retryable": (f"{RECORDED}[cumulative/s_err_max_neg]",),
    "object": (_UNARY_ERRORS,),
    "param": (_UNARY_ERRORS,),
}
FRAMING: dict[str, tuple[str, ...]] = {
    "status": (RECORDED, RECORDED_UNARY),
    "content-type": ("tests/relay/test_last_words.py::test_the_head_is_the_one_of_the_worker_that_answers",),
    "data": (
        "tests/contract/test_sglang_replay.py::test_stream_is_untouched",
        f"{UNIT}hostile.py::test_events_of_several_lines",
    ),
    "[DONE]": (
        f"{UNIT}finish.py::test_only_the_terminator_is_lost",
        "tests/relay/test_unprotected.py::test_each_row_is_served_named_and_loud",
    ),
    "comments": (f"{UNIT}ends.py::test_comments_pass_and_are_no_progress",),
    "events": (f"{UNIT}kills.py::test_anything_goes",),
}


def _request(name: str) -> tuple[str, ...]:
    forbids = (f"{FIELDS}test_refused_field[{name}]",) if fates.refused("top level", name) else ()
    return (f"{FIELDS}test_request_field[{name}]", *forbids, *REQUEST.get(name, ()))


def _sampling(name: str) -> tuple[str, ...]:
    forbids = (f"{FIELDS}test_refused_sampling_field[{name}]",) if fates.refused("`sampling_params`", name) else ()
    return (f"{FIELDS}test_sampling_field[{name}]", *forbids, *SAMPLING.get(name, ()))


def _meta(name: str) -> tuple[str, ...]:
    found = RULES.get(name, Rule.FIRST)
    sweep = "test_uncontinued_field" if found is Rule.UNCONTINUED else "test_meta_info_field"
    sweeps = tuple(f"{FIELDS}{sweep}[{name}-{mode}]" for mode in ("sse", "unary"))
    return (*sweeps, *OF_RULE.get(found, ()), *META.get(name, ()))


def _finish(name: str) -> tuple[str, ...]:
    return (f"{FIELDS}test_finish_reason_field[{name}]", *FINISH.get(name, ()))


SECTIONS = (
    Section(
        "Requests: the top level",
        "Unknown fields are passed in the client's own bytes, like these.",
        fields.REQUEST,
        fates.request,
        _request,
    ),
    Section(
        "Requests: `sampling_params`",
        "Stock answers 400 to an unknown one; so it does through the proxy.",
        fields.SAMPLING,
        fates.sampling,
        _sampling,
    ),
    Section(
        "Answers: the top level, of an event too",
        "Unknown fields are passed as the last attempt tells them.",
        fields.ANSWER,
        fates.ANSWER.__getitem__,
        ANSWER.__getitem__,
    ),
    Section(
        "Answers: `meta_info`",
        "A model's own fields (`customized_info`) and those of other releases: a list with one element a token in each "
        "attempt is joined like the known ones, and a continuation that lacks it is not taken; what may be rows in "
        "some encoding, and was not told of the earlier tokens, fails loudly; anything else is as the "
        "last attempt tells it. `NaN` and the infinities stay what they are, wherever they stand. "
        '"This attempt" is the one whose event it is. '
        "Stock tells `spec_*` with the finish only: those of an attempt that was cut are not "
        "known, and not in the sums.",
        (*fields.META_INFO, *ANY),
        lambda name: ANY[name][0] if name in ANY else fates.meta_info(name),
        lambda name: ANY[name][1] if name in ANY else _meta(name),
    ),
    Section("Answers: `finish_reason`", "", fields.FINISH_REASON, fates.FINISH_REASON.__getitem__, _finish),
    Section("Answers: errors", "", fields.ERROR, fates.ERROR.__getitem__, ERROR.__getitem__),
    Section("Answers: the framing of a stream", "", fields.FRAMING, fates.FRAMING.__getitem__, FRAMING.__getitem__),
)

_TOP = """# What becomes of each field

Generated: `python -m tests.fields > docs/fields.md`; do not edit.

Every field of native `/generate` in SGLang 0.5.23. While nothing happens a stream's client sends and gets its own bytes
and the worker's; the tables say what is changed otherwise, for continuations above all. "Refused" is about protection:
such a request is served, in the client's own bytes, but not continued when its worker dies
([admission.md](admission.md) says why). The tests are those that fail if it is not so; `[...]` is a parameter of
theirs.
"""


def named() -> Iterator[str]:
    """All tests that the page names, in its order."""
    for section in SECTIONS:
        for name in section.names:
            yield from section.shown(name)


def page() -> str:
    """The page."""
    lines = [_TOP]
    for section in SECTIONS:
        lines += [f"## {section.title}", ""] + ([section.text, ""] if section.text else [])
        lines += ["| field | what becomes of it | shown by |", "|---|---|---|"]
        for name in section.names:
            shown = "<br>".join(f"`{test[test.index('test_') :]}`" for test in section.shown(name))
            lines.append(f"| `{name}` | {section.becomes(name)} | {shown} |")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
