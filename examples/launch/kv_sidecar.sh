#!/usr/bin/env bash
# The proxy follows what the engines have cached, and sends a request where most of its prompt is; with sidecars.
. "$(dirname "$0")/lib.sh"
for n in $(numbers "$ENGINES"); do engine "$n" $(kv_flags "$n") && sidecar "$n"; done
relay --policy kv_aware
together
