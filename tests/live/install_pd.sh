#!/bin/bash
# What stock SGLang needs for prefill/decode pairs, into the venv that install_sglang_cpu.sh has made.
# usage: install_pd.sh VENV
# Mooncake's transfer engine is linked against four libraries of the system; on Debian, root gets those that are missing.
set -euo pipefail
venv=${1:?usage: install_pd.sh VENV}
stamp=$(sha256sum < "$0" | cut -d' ' -f1)
if [ "$(cat "$venv/.stamp-pd" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

works() { "$venv/bin/python" -c "from mooncake.engine import TransferEngine" 2>> "$log"; }
log=$venv/install-pd.log
echo "installing what prefill/decode pairs need into $venv"
# shellcheck disable=SC2086  # a list of arguments, by design
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps ${DYN_LIVE_PIP_ARGS:-} \
  mooncake-transfer-engine-non-cuda==0.3.13.post1 > "$log" 2>&1 || { tail -20 "$log" >&2; exit 1; }
works || {
  command -v apt-get > /dev/null && [ "$(id -u)" = 0 ] &&
    { apt-get update && apt-get install -y --no-install-recommends libibverbs1 librdmacm1 libnuma1 libcurl4; } >> "$log" 2>&1
} || true
works || { echo "libibverbs1, librdmacm1, libnuma1 or libcurl4 is missing:" >&2; tail -5 "$log" >&2; exit 1; }
echo "$stamp" > "$venv/.stamp-pd"
