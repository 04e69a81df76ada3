#!/usr/bin/env bash
# Prefill/decode pairs, each engine with a sidecar that registers it for what it says it is for.
. "$(dirname "$0")/lib.sh"
for n in $(numbers "$ENGINES"); do
    engine "$n" --disaggregation-mode prefill --disaggregation-bootstrap-port "$(bootstrap_port "$n")" && sidecar "$n"
done
for n in $(seq "$ENGINES" $((2 * ENGINES - 1))); do engine "$n" --disaggregation-mode decode && sidecar "$n"; done
relay --pd-disaggregation
together
