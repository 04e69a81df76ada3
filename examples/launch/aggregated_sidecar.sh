#!/usr/bin/env bash
# Engines that do all of a request, each with a sidecar that registers it.
. "$(dirname "$0")/lib.sh"
for n in $(numbers "$ENGINES"); do engine "$n" && sidecar "$n"; done
relay
together
