#!/bin/bash
# Stock SGLang 0.5.23 into a venv, for the CPU, unmodified.
# usage: install_sglang_cpu.sh VENV
# Does nothing if VENV was already made by this very script and its constraints.
#
# sglang's own dependency list would bring several GB of CUDA packages, so it goes in with --no-deps, then only what its
# CPU path imports. torch is pinned by its public version; where pip would choose a CUDA build of it, name a source of
# CPU builds in DYN_LIVE_PIP_ARGS.
set -euo pipefail
venv=${1:?usage: install_sglang_cpu.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
constraints=$here/constraints-sglang-cpu.txt
stamp=$(cat "$0" "$constraints" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

python=${DYN_LIVE_PYTHON:-python3.11}
echo "installing sglang 0.5.23 for the CPU into $venv (about two minutes, 2.2 GB)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
log=$venv/install.log
# shellcheck disable=SC2206  # a list of arguments, by design
pip=("$venv/bin/pip" install -q --disable-pip-version-check -c "$constraints" ${DYN_LIVE_PIP_ARGS:-})
# Without its dependency list pip calls sglang broken, at length: that stays in the log.
{
  "${pip[@]}" torch &&
  "${pip[@]}" --no-deps sglang torchvision compressed-tensors xgrammar triton &&
  "${pip[@]}" transformers fastapi uvicorn uvloop pyzmq orjson msgspec psutil pydantic requests aiohttp numpy \
    pybase64 setproctitle prometheus-client python-multipart packaging tqdm pillow dill apache-tvm-ffi sentencepiece \
    loguru gguf openai openai-harmony partial-json-parser jsonschema soundfile ipython einops
} > "$log" 2>&1 || { tail -20 "$log" >&2; exit 1; }
echo "$stamp" > "$venv/.stamp"
