"""Law 1 for answers with text: tokenizers full of characters in parts, cut anywhere, in every dialect."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from dyn_testkit import faults
from dyn_testkit.engine import Model
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.sglang import SGLang
from dyn_testkit.oracle import Oracle
from dyn_testkit.simnet import WHOLE, Fragmentation
from dyn_testkit.strategies import dictionaries
from dyn_testkit.tokenizer import BYTE_LEVEL
from dyn_testkit.worker import WorkerOptions
from properties import checks
from properties.prove import ENOUGH, prove
from properties.proxies import Simulated

#: It says nothing but what is hard to cut: special tokens, parts of characters, and bytes that are in none.
MODEL = Model(vocab_size=65, context_length=4096)
OPTIONS = WorkerOptions(model=MODEL, tokenizer=BYTE_LEVEL, skip_tokenizer_init=False)
ORACLE = Oracle(MODEL, tokenizer=BYTE_LEVEL)
WIRE = SGLang(BYTE_LEVEL)
#: Examples; a multiple of the usual number.
EXAMPLES = 2048

#: An engine sends its finish with the last token. Where it does not, text that was withheld is lost with it: see
#: `tests/relay/test_texts.py`.
SPOTS = some.spots().filter(lambda where: where != faults.AFTER_LAST_TOKEN)

SAMPLING = dictionaries(
    {},
    {
        "skip_special_tokens": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "no_stop_trim": st.booleans(),
        "stop": st.lists(st.sampled_from(["e", "<|im_end|>", "<|im", "|><", "STOP", "\n"]), max_size=2),
    },
)
TEXT = st.lists(
    st.sampled_from(["é", "👩\u200d👨", "<|im_start|>", " the", "中", "한", "e\u0301"]), min_size=1, max_size=5
)
#: By ids or by a text; with the text of each logprob's token or without.
ASKED = dictionaries({}, {"text": TEXT.map("".join), "return_text_in_logprobs": st.booleans()})


def dressed(body, asked, sampling):
    value = {**json.loads(body), **asked}
    if "text" in asked:
        del value["input_ids"]
        value.pop("logprob_start_len", None)
    return json.dumps({**value, "sampling_params": {**value["sampling_params"], **sampling}}).encode()


#: Bytes are cut one by one for the laws of all answers.
READS = st.sampled_from([WHOLE, Fragmentation(64)])
BODIES = st.builds(dressed, some.bodies(MODEL), ASKED, SAMPLING)


@pytest.fixture(scope="module")
def simulated():
    return Simulated(OPTIONS)


def test_text_is_that_of_the_uninterrupted_run(simulated):
    goals = ["continued", "continued twice", "three kills in one request", "dialect changed across a cut"]
    cases = some.cases(BODIES, some.plans(where=SPOTS), READS).map(lambda case: replace(case, wire=WIRE))
    hard = [
        replace(case, body=dressed(case.body, asked, {}), wire=WIRE)
        for case in some.hard(MODEL)
        for asked in ({}, {"text": "é👩\u200d"})
        if all(where != faults.AFTER_LAST_TOKEN for where, _ in case.faults)
    ]
    # A character that the cut is inside, of a stream whose dialect no event has shown yet.
    both = {"input_ids": [0], "return_logprob": True, "stream": True}
    sampling = {"temperature": 0, "max_new_tokens": 3, "logit_bias": {"3": 1.5}}
    body = json.dumps({**both, "sampling_params": sampling}).encode()
    plan = ((faults.at_token(1), faults.CLOSE),)
    hard += [some.Case(body, plan, (dialect,), WHOLE, wire=WIRE) for dialect in some.DIALECTS]
    prove(checks.equivalence(simulated, ORACLE), cases, sometimes=goals, begin=hard, times=EXAMPLES // ENOUGH)
