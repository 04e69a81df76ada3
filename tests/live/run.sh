#!/bin/bash
# Qualify the proxy against stock SGLang on this machine's CPU.
# usage: run.sh [--flavour cumulative|incremental|experts|seeded] [CASE ...]     (--list names the cases)
#
# The engine and the models are made once, in DYN_LIVE_HOME (default ${XDG_CACHE_HOME:-~/.cache}/dyn-relay-live), where
# logs, histories and report.json are left too. PYTHON is the one with the proxy installed (default .venv/bin/python).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${DYN_LIVE_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/dyn-relay-live}
python=${PYTHON:-$here/../../.venv/bin/python}
case " $* " in
  *" --list "*) exec "$python" "$here/qualify.py" --home "$here" --list ;; # names need no engine
esac
mkdir -p "$home"
bash "$here/install_sglang_cpu.sh" "$home/venv"
bash "$here/install_pd.sh" "$home/venv" || echo "prefill/decode pairs will not start" >&2
[ -f "$home/models/qwen3moe-fp32/tokenizer_config.json" ] || # the last file that it makes
  PYTHONPATH=$here/shim PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 \
    "$home/venv/bin/python" "$here/make_models.py" "$home/models" > "$home/models.log" 2>&1 ||
  { tail -20 "$home/models.log" >&2; exit 1; }
exec "$python" "$here/${PROGRAM:-qualify.py}" --home "$home" "$@"
