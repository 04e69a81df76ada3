# Sourced by the scripts beside it: the engines, sidecars and proxy of one topology, which end together.
#
#   MODEL        what the engines load (for the default ENGINE)
#   ENGINE       how an engine is started; it gets --host, --port, --grpc-port and the flags of its part
#   KV_FLAGS     what makes engine {n} publish its KV events on port {port}
#   PORT         the proxy's port
#   FIRST_PORT   engine n has the ten ports from FIRST_PORT + 10 n: HTTP, gRPC, its sidecar, bootstrap, KV events
#   ENGINES      how many (of each part)
#   RELAY_FLAGS, SIDECAR_FLAGS   more flags
#
# Engine n runs on GPU n (CUDA_VISIBLE_DEVICES).
set -euo pipefail

ENGINE=${ENGINE:-"python -m sglang.launch_server --model-path ${MODEL:-}"}
KV_FLAGS=${KV_FLAGS:-'--page-size 16 --kv-events-config {"publisher":"zmq","endpoint":"tcp://*:{port}","topic":"kv"}'}
PORT=${PORT:-8000} FIRST_PORT=${FIRST_PORT:-30000} ENGINES=${ENGINES:-2}
RELAY_FLAGS=${RELAY_FLAGS:-} SIDECAR_FLAGS=${SIDECAR_FLAGS:-}
RELAY=http://127.0.0.1:$PORT

# Of engine $1.
http_port() { echo $((FIRST_PORT + 10 * $1)); }
grpc_port() { echo $((FIRST_PORT + 10 * $1 + 1)); }
sidecar_port() { echo $((FIRST_PORT + 10 * $1 + 2)); }
bootstrap_port() { echo $((FIRST_PORT + 10 * $1 + 3)); }
kv_flags() { echo "${KV_FLAGS//\{port\}/$((FIRST_PORT + 10 * $1 + 4))}"; }

numbers() { seq 0 $(($1 - 1)); }
# The URLs of engines $2... on their gRPC ports, as values of the flag $1.
grpc_urls() {
    local flag=$1 n
    shift
    for n in "$@"; do echo "$flag grpc://127.0.0.1:$(grpc_port "$n")"; done
}

# engine N FLAGS...
engine() {
    local n=$1
    shift
    CUDA_VISIBLE_DEVICES=$n $ENGINE --host 127.0.0.1 --port "$(http_port "$n")" --grpc-port "$(grpc_port "$n")" "$@" &
}

SIDECARS=

# sidecar N: beside engine N
sidecar() {
    dyn-sidecar --engine "http://127.0.0.1:$(http_port "$1")" --relay "$RELAY" \
        --listen "127.0.0.1:$(sidecar_port "$1")" $SIDECAR_FLAGS &
    SIDECARS+=" $!"
}

# relay FLAGS...
relay() {
    dyn-relay serve --port "$PORT" $RELAY_FLAGS "$@" &
    PROXY=$!
}

# Until the proxy ends, or a signal comes: then all do. Sidecars withdraw first, and what is live is answered before the
# engines go; a second signal ends all at once. An engine that dies ends nothing: the others go on, and one that is
# started in its place is found.
together() {
    trap ending EXIT TERM INT
    wait "$PROXY"
}
ending() {
    trap 'kill -KILL $(jobs -p) 2>/dev/null || true' EXIT TERM INT
    end $SIDECARS
    end "$PROXY"
    end $(jobs -p)
    trap - EXIT
}
end() { [ $# -eq 0 ] || { kill "$@" 2>/dev/null || true; wait "$@" || true; }; }
