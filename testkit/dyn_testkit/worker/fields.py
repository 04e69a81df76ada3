"""Every field of native `/generate` in SGLang 0.5.23, by name: what may be asked, and what may be answered.

Requests: `GenerateReqInput` (managers/io_struct.py) in its order; all are read, unknown ones are ignored. Answers:
managers/tokenizer_manager.py, its error shapes: entrypoints/http_server.py. A model may add fields of its own to
`meta_info` (`customized_info`), and other releases have others.
"""

from __future__ import annotations

from dyn_testkit.worker.schema import SAMPLING as _CHECKS

REQUEST: tuple[str, ...] = (
    "rid",
    "session_id",
    "text",
    "input_ids",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "mm_hashes",
    "mm_content_hashes",
    "use_audio_in_video",
    "video_config",
    "sampling_params",
    "watermark",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_text_in_logprobs",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "stream",
    "log_metrics",
    "return_hidden_states",
    "return_routed_experts",
    "routed_experts_start_len",
    "return_indexer_topk",
    "modalities",
    "session_params",
    "lora_path",
    "lora_id",
    "custom_logit_processor",
    "positional_embed_overrides",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "routing_key",
    "conversation_id",
    "http_worker_ipc",
    "background",
    "require_reasoning",
    "max_thinking_tokens",
    "priority",
    "extra_key",
    "no_logs",
    "custom_labels",
    "return_bytes",
    "return_entropy",
    "return_prompt_token_ids",
    "external_trace_header",
    "received_time",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "encoder_urls",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "image_max_dynamic_patch",
    "video_max_dynamic_patch",
    "images_config",
    "mm_processor_kwargs",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
    "cache_salt",
    "kv_hints",
)
SAMPLING: tuple[str, ...] = tuple(_CHECKS)

#: Of an answer, and of each event of a stream.
ANSWER: tuple[str, ...] = ("text", "output_ids", "meta_info", "prompt_token_ids", "index", "error")

#: In the order of the wire: always, with `return_logprob` (its tops, its flat tops), always, for some requests, with
#: --enable-metrics, of speculative servers.
META_INFO: tuple[str, ...] = (
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "input_token_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
    *(
        f"{side}_top_logprobs_{part}"
        for side in ("input", "output")
        for part in (
            "val_flat",
            "idx_flat",
            "val_flat_b64",
            "idx_flat_b64",
            "val_flat_b64_dtype",
            "idx_flat_b64_dtype",
            "shape",
            "null_prefix",
        )
    ),
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    "output_token_sampling_mask_length",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_versions",
    "cached_tokens_details",
    "image_tokens",
    "audio_tokens",
    "video_tokens",
    "hidden_states",
    "routed_experts",
    "indexer_topk",
    "beam_results",
    "sequence_score",
    "dp_rank",
    "e2e_latency",
    "response_sent_to_client_ts",
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
    "spec_accept_rate",
    "spec_accept_length",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_verify_ct",
    "spec_cap_length",
    "spec_block_accept_length",
    "spec_correct_drafts_histogram",
    "spec_cap_lens_histogram",
)

#: Of stop, length and abort; an abort in the queue has no `err_type`, and may have no `status_code`.
FINISH_REASON: tuple[str, ...] = ("type", "matched", "length", "message", "status_code", "err_type")

#: Of an error: under `error` (a string, or an object) or at the top level.
ERROR: tuple[str, ...] = ("message", "type", "code", "retryable", "object", "param")

#: How a stream is framed.
FRAMING: tuple[str, ...] = ("status", "content-type", "data", "[DONE]", "comments", "events")
