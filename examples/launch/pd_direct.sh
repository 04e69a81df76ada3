#!/usr/bin/env bash
# Prefill/decode pairs over gRPC: the first ENGINES engines compute prompts, as many others compute answers.
. "$(dirname "$0")/lib.sh"
prefill=$(numbers "$ENGINES") decode=$(seq "$ENGINES" $((2 * ENGINES - 1)))
for n in $prefill; do engine "$n" --disaggregation-mode prefill --disaggregation-bootstrap-port "$(bootstrap_port "$n")"; done
for n in $decode; do engine "$n" --disaggregation-mode decode; done
relay $(grpc_urls --prefill-engine-url $prefill) $(grpc_urls --engine-url $decode)
together
