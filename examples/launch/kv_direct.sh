#!/usr/bin/env bash
# The proxy follows what the engines have cached, and sends a request where most of its prompt is; over gRPC.
. "$(dirname "$0")/lib.sh"
for n in $(numbers "$ENGINES"); do engine "$n" $(kv_flags "$n"); done
relay --policy kv_aware $(grpc_urls --engine-url $(numbers "$ENGINES"))
together
