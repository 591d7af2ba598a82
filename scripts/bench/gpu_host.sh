#!/usr/bin/env bash
# What a GPU host can tell, without a network: each stage within eight minutes, results written as they are found.
#
#   scripts/bench/gpu_host.sh OUT_DIR STAGE...        stages: preflight headline tests
#                                                   micro ours peers 70b single_gpu bert
#   scripts/bench/gpu_host.sh OUT_DIR --device cpu --tiny STAGE...     the same with tiny shapes: does everything run?
#
# After a failed preflight nothing follows. OUT_DIR/STAGE.jsonl has a line for each measurement, OUT_DIR/STAGE.log what the programs said. The folder .whl/ in
# the root of the checkout, if there is one, has wheels that the host lacks; they are put beside its own packages for
# these stages only, and torch, triton and NVIDIA's libraries never come from there.
# APP_PYTHON is the interpreter (python3 without it); BENCH_SITE where the wheels are unpacked.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
usage() {
  sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}
(($# >= 2)) || usage
mkdir -p -- "$1"
out=$(cd -- "$1" && pwd -P)
shift
options=() stages=()
while (($#)); do
  case $1 in
    --tiny) options+=("$1") ;;
    --device | --seconds)
      (($# >= 2)) || usage
      options+=("$1" "$2")
      shift
      ;;
    preflight | headline | tests | micro | ours | peers | 70b | single_gpu | bert) stages+=("$1") ;;
    *)
      echo "$1 is no stage: preflight headline tests micro ours peers 70b single_gpu bert" >&2
      usage
      ;;
  esac
  shift
done
((${#stages[@]})) || usage

APP_PYTHON=$(command -v -- "${APP_PYTHON:-python3}")
export APP_PYTHON HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
cd "$root"

# Wheels beside the host's own packages, unpacked once.
wheels=()
if [[ -d .whl ]]; then
  mapfile -t wheels < <(find .whl -type f -name '*.whl' ! -name 'torch-*' ! -name 'triton-*' ! -name 'nvidia_*' | sort)
fi
if ((${#wheels[@]})); then
  site=${BENCH_SITE:-${TMPDIR:-/tmp}/app-bench-site-$UID}
  if [[ ! -f $site/unpacked || $(<"$site/unpacked") != "${wheels[*]}" ]]; then
    rm -rf -- "$site"
    "$APP_PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${wheels[@]}"
    printf '%s\n' "${wheels[*]}" >"$site/unpacked"
  fi
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

code=0
for stage in "${stages[@]}"; do
  "$APP_PYTHON" -m scripts.bench.stages "$stage" --out "$out" "${options[@]}" || code=$?
  [[ $stage == preflight && $code != 0 ]] && break # what follows would fail too
done
exit "$code"
