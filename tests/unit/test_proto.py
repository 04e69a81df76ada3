"""Our .proto is the one that was verified, the Python is made of it, and both say what SGLang's binary says."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

import dyn_relay.grpc
from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb

PROTO = Path(dyn_relay.grpc.__file__).with_name("sglang.proto")

#: What was decoded from and encoded for a live server of this release. A new text needs a new look at one.
VERIFIED = ("0.5.23", "a4359b3ac5fd6094957b29c6a5ef5d90d8ad0cbca1541639498cf85a46728346")

#: Read out of the compiled server of SGLang 0.5.23, not from our .proto: the fields of each message in the order of
#: their numbers, which begin with 1 and leave none out. `?`: presence is told; `*`: repeated.
TABLE = {
    "SamplingParams": (
        "temperature:float? top_p:float? top_k:int32? min_p:float? frequency_penalty:float? "
        "presence_penalty:float? repetition_penalty:float? max_new_tokens:int32? min_new_tokens:int32? "
        "stop:string* stop_token_ids:int32* ignore_eos:bool? n:int32? json_schema:string? regex:string? "
        "seed:int64? guided_decoding:GuidedDecoding?"
    ),
    "GuidedDecoding": "json_schema:string regex:string ebnf:string choice:ChoiceConstraint structural_tag:string",
    "ChoiceConstraint": "values:string*",
    "DisaggregatedParams": "bootstrap_host:string bootstrap_port:int32 bootstrap_room:int64",
    "KVHintsEnvelope": "protocol_version:string message_id:string actions:KVHintAction*",
    "KVHintAction": "action_id:string action_type:string action_version:string payload:Struct",
    "TextGenerateRequest": (
        "text:string sampling_params:SamplingParams? stream:bool? return_logprob:bool? "
        "top_logprobs_num:int32? logprob_start_len:int32? return_text_in_logprobs:bool? rid:string? "
        "lora_path:string? routing_key:string? routed_dp_rank:int32? trace_headers:map<string,string> "
        "session_id:string? disaggregated_params:DisaggregatedParams? priority:int32? require_reasoning:bool? "
        "max_thinking_tokens:uint32? kv_hints:KVHintsEnvelope?"
    ),
    "TextGenerateResponse": "text:string meta_info:map<string,string> finished:bool",
    "GenerateRequest": (
        "input_ids:int32* sampling_params:SamplingParams? stream:bool? return_logprob:bool? "
        "top_logprobs_num:int32? logprob_start_len:int32? rid:string? lora_path:string? routing_key:string? "
        "routed_dp_rank:int32? trace_headers:map<string,string> session_id:string? "
        "disaggregated_params:DisaggregatedParams? priority:int32? require_reasoning:bool? "
        "max_thinking_tokens:uint32? kv_hints:KVHintsEnvelope? return_text:bool? image_data:string* "
        "video_data:string* audio_data:string*"
    ),
    "GenerateResponse": "output_ids:int32* meta_info:map<string,string> finished:bool text:string?",
    "AbortRequest": "rid:string abort_all:bool",
    "AbortResponse": "success:bool",
    "HealthCheckRequest": "",
    "HealthCheckResponse": "healthy:bool",
    "GetModelInfoRequest": "",
    "GetModelInfoResponse": "model_path:string json_info:string",
    "GetServerInfoRequest": "",
    "GetServerInfoResponse": "json_info:string",
    "GetLoadRequest": "dp_rank:int32?",
    "GetLoadResponse": "json_info:string",
    "ListModelsRequest": "",
    "ListModelsResponse": "models:ModelCard*",
    "ModelCard": "id:string root:string parent:string? max_model_len:int32?",
    "TokenizeRequest": "text:string add_special_tokens:bool?",
    "TokenizeResponse": "tokens:int32* count:int32 max_model_len:int32 input_text:string",
    "DetokenizeRequest": "tokens:int32*",
    "DetokenizeResponse": "text:string",
    "WatchEngineStateRequest": "",
    "EngineStateSnapshot": (
        "instance_id:uint64 revision:uint64 healthy:bool is_pause:bool model_info:GetModelInfoResponse "
        "server_info:GetServerInfoResponse"
    ),
    "FlushCacheRequest": "",
    "FlushCacheResponse": "success:bool message:string",
    "PauseGenerationRequest": "mode:string",
    "PauseGenerationResponse": "message:string",
    "ContinueGenerationRequest": "",
    "ContinueGenerationResponse": "message:string",
    "StartProfileRequest": "output_dir:string?",
    "StartProfileResponse": "message:string",
    "StopProfileRequest": "",
    "StopProfileResponse": "message:string",
    "UpdateWeightsRequest": "model_path:string load_format:string?",
    "UpdateWeightsResponse": "success:bool message:string",
}

STREAMS = {"Generate", "TextGenerate", "WatchEngineState"}

_KINDS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def test_the_text_is_the_one_that_was_verified() -> None:
    release, digest = VERIFIED
    text = PROTO.read_bytes()
    assert hashlib.sha256(text).hexdigest() == digest, f"verify it against SGLang {release} again, then pin it"
    assert f"SGLang {release}" in text.decode().partition("syntax")[0]


def spelled(field: FieldDescriptor) -> str:
    """`name:type` and a mark, as in the table."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        entry = field.message_type
        if entry.GetOptions().map_entry:
            key, value = (spelled(entry.fields_by_name[name]).partition(":")[2] for name in ("key", "value"))
            return f"{field.name}:map<{key},{value}>"
        kind = entry.name
    else:
        kind = _KINDS[field.type]
    oneof = field.containing_oneof
    told = oneof is not None and [f.name for f in oneof.fields] == [field.name] and oneof.name == f"_{field.name}"
    return f"{field.name}:{kind}{'*' if field.is_repeated else '?' if told else ''}"


def fields(message: Descriptor) -> dict[int, str]:
    return {field.number: spelled(field) for field in message.fields}


@pytest.mark.parametrize("name", TABLE)
def test_fields_are_the_servers(name: str) -> None:
    assert fields(pb.DESCRIPTOR.message_types_by_name[name]) == dict(enumerate(TABLE[name].split(), 1))


def test_no_message_is_left_out() -> None:
    assert set(pb.DESCRIPTOR.message_types_by_name) == set(TABLE)


def test_a_constraint_is_one_of_several() -> None:
    (constraint,) = pb.GuidedDecoding.DESCRIPTOR.oneofs
    assert [field.name for field in constraint.fields] == ["json_schema", "regex", "ebnf", "choice", "structural_tag"]


def declared(text: str) -> dict[str, dict[int, str]]:
    """The messages of a .proto, spelled as in the table."""
    text = re.sub(r"//[^\n]*", "", text)
    found = {}
    for name, body in re.findall(r"message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", text):
        rows = re.findall(r"(optional |repeated |)(map<\w+, \w+>|[\w.]+) (\w+) = (\d+);", body)
        marks = {"optional ": "?", "repeated ": "*", "": ""}
        found[name] = {
            int(number): f"{field}:{kind.replace(' ', '').removeprefix('google.protobuf.')}{marks[label]}"
            for label, kind, field, number in rows
        }
    return found


def test_the_python_is_made_of_the_text() -> None:
    made = {message.name: fields(message) for message in pb.DESCRIPTOR.message_types_by_name.values()}
    assert made == declared(PROTO.read_text())


def test_methods_are_the_servers() -> None:
    rows = re.findall(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);", PROTO.read_text())
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    made = [(m.name, m.input_type.name, "stream " * m.server_streaming, m.output_type.name) for m in service.methods]
    assert made == rows
    assert {name for name, _, stream, _ in rows if stream} == STREAMS
    assert not any(method.client_streaming for method in service.methods)


def test_the_table_of_methods_says_the_same() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == methods.SERVICE
    called = [value for value in vars(methods).values() if isinstance(value, methods.Method)]
    assert len(called) == len(service.methods)
    for method in called:
        declared_as = service.methods_by_name[method.path.removeprefix(f"/{methods.SERVICE}/")]
        assert method.request.DESCRIPTOR is declared_as.input_type
        assert method.response.DESCRIPTOR is declared_as.output_type
        assert method.streams is declared_as.server_streaming
