#!/usr/bin/env bash
# Run on a GPU machine, in the repository's root with .kit in it:  bash .kit/run.sh [STEP ...]
#   kernels   our kernels against their definitions         tests     tests of kernels and of the cache on the device
#   gpu       saves and loads of a handoff
#   answers   output of each set-up against one engine's    small large    load on models of 1.7 and 8 billion
#   models    models of many kinds, and images
#   compiled  small with vLLM's default, torch.compile      parameters
# The default is all except models, large and compiled. Each step has a time limit, and so has the whole run (TOTAL_S, 560). A
# failed step does not stop the run. Results and logs are in $OUT (.kit/out) after each step.
# ARMS="one shm" limits answers, MODELS="gemma3" models; SIZE_ARGS adds arguments of gpu-serve to small and large.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE
kit=${KIT:-/tmp/baton-kit} # where the kit is unpacked
export OUT=${OUT:-$PWD/.kit/out}
mkdir -p "$OUT" "$kit/logs"
began=$SECONDS
say() { echo "[$((SECONDS - began)) s] $*"; }

if [ ! -e "$kit/.unpacked" ]; then
  for part in 1 2; do
    [ -e ".kit/$part/kit.tar.xz" ] || { say "missing: .kit/$part/kit.tar.xz (make gpu-kit)"; exit 3; }
    tar -xJf ".kit/$part/kit.tar.xz" -C "$kit" &
  done
  wait
  python3 -m compileall -q -j 0 "$kit" src bench harness >/dev/null 2>&1 # templates do not compile
  touch "$kit/.unpacked"
  say "unpacked"
fi
export PYTHONPATH=$PWD/src:$PWD:$kit PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$kit/triton VLLM_CACHE_ROOT=$kit/cache
# FlashInfer and the hub are not available on the GPU machine.
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

step() { # NAME LIMIT COMMAND ...
  local name=$1 limit=$2 at=$SECONDS left=$((${TOTAL_S:-560} - SECONDS + began)) status
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  [ "$limit" -ge 15 ] || { say "== $name left out: $left s are left"; return; }
  say "== $name (at most $limit s)"
  timeout -k 25 "$limit" "$@" 2>&1 | tee "$kit/logs/$name.out" | cut -c1-700 | tail -n 60
  status=${PIPESTATUS[0]}
  cp -f bench/results/{kernels-cuda,gpu-cuda,gpu-serve}.json "$OUT" 2>/dev/null
  tar -cJf "$OUT/logs.tar.xz" -C "$kit" --exclude='model-*' logs $(cd "$kit" && ls -d serve 2>/dev/null)
  say "== $name ended with $status after $((SECONDS - at)) s"
}
serve() { # NAME LIMIT ARGUMENT ...
  step "$1" "$2" python3 -m bench gpu-serve --folder "$kit/serve/$1" "${@:3}"
}

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
for name in ${*:-kernels gpu tests answers small}; do
  case $name in
    kernels) step kernels 90 python3 -m bench kernels --device cuda ;;
    gpu) step gpu 60 python3 -m bench gpu --skip-kernels ;;
    tests) step tests 130 python3 -m pytest -q -n 8 -p no:benchmark -p no:cacheprovider tests/kernels tests/handoff/memory ;;
    answers) serve answers 120 --parts answers ${ARMS:+--arms $ARMS} ;;
    models) serve models 200 --parts models ${MODELS:+--arms $MODELS} --start-s 120 ;;
    small) serve small 165 --parts load streams --sizes 1.7 --seconds 7 --rounds 2 --load-seconds 3 --start-s 80 ${SIZE_ARGS:-} ;;
    large) serve large 130 --parts load streams --sizes 8 --seconds 7 --rounds 1 --load-seconds 3 --start-s 80 ${SIZE_ARGS:-} ;;
    compiled) serve compiled 100 --parts compiled --sizes 1.7 --seconds 6 --rounds 1 --start-s 75 ;;
    *) say "no step $name" ;;
  esac
done
say "done: $OUT"
