"""`sglang-zstd`: native SGLang whose workers give `routed_experts` as Base64 of zstd of the native bytes."""

from dyn_relay.formats.sglang.format import SglangFormat
from sglang_zstd.codec import ZstdExperts

__all__ = ["SglangZstd", "ZstdExperts"]


class SglangZstd(SglangFormat):
    """The native format with another codec. Everything else, other sequence fields included, is inherited."""

    name = "sglang-zstd"
    codec = ZstdExperts()
