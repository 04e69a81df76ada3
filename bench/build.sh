#!/usr/bin/env bash
# Build the mock worker, the load generator and the bare relay into bin/ and write the request bodies into bodies/.
# Needs cargo and python3; fetches nothing (no crates).
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p bin
cargo build --quiet --release --offline --target-dir bin/target
for name in mockworker loadgen relay; do
    install "bin/target/release/$name" "bin/$name"
done
python3 bodies.py bodies
