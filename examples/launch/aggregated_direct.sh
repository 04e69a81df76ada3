#!/usr/bin/env bash
# Engines that do all of a request, reached over gRPC by the proxy itself.
. "$(dirname "$0")/lib.sh"
for n in $(numbers "$ENGINES"); do engine "$n"; done
relay $(grpc_urls --engine-url $(numbers "$ENGINES"))
together
