#!/bin/bash
# A short run on a borrowed GPU: bits, tests, figures and memory checkers, the most informative
# parts first. Everything is built beforehand, on a machine with nvcc:
#
#     benchmarks/card_run.sh build              # for Hopper, into build/card_run, below 64 MiB
#     OUT=DIR benchmarks/card_run.sh [PART …]   # on the card; WITHIN=500 (seconds)
#
# Each part has a time limit and a log. A part that has passed is not run again, so a second call
# continues the first. $OUT gets report.txt, with a line for each part, and logs.tgz, with all logs
# and figures; both are written after each part. The status is 1 if a part failed, 2 for a part that
# is unknown.
SELF=$(realpath "$0") ONLY=" $* "
[ -z "$OUT" ] || { mkdir -p "$OUT" && OUT=$(realpath "$OUT"); } || exit
cd "$(dirname "$SELF")/.." || exit
D=${CARD_RUN:-$PWD/build/card_run}; L=$D/log PY=$(command -v python3)
for name in $ONLY; do
  [ "$name" = build ] || grep -q "part $name " "$SELF" ||
    { echo "card_run.sh: expected 'build' or parts of this script, got '$name'" >&2; exit 2; }
done
export D L

if [ "$1" = build ]; then
  set -e
  [ "$OUT" ] || rm -rf "$L"
  export ROLLMESH_CUDA=1 ROLLMESH_CUDA_ARCHS=${ROLLMESH_CUDA_ARCHS:-sm_90a}
  $PY setup.py -q build --build-lib "$D/lib" --build-temp "$D/cuda"
  $PY tests/support/cuda_build.py gpu --into "$D"
  $PY tests/support/cuda_build.py simt_library --into "$D"
  cp "$($PY tests/support/native_build.py checkops)" "$D/"
  cp "$D/lib/rollmesh/librollmesh_cuda.so" "$D/cuda/"
  find "$D" -name '*.[oa]' -delete -o -name '*.gch' -delete
  rm -r "$D/reference_gpu"
  strip "$D"/checkops "$D"/*_gpu "$D"/*_mma "$D"/bench_wgmma "$D"/*.so
  git describe --always --dirty=+ >"$D/commit"
  du -sm "$D"
  exit
fi

export OUT=${OUT:-$D} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 SEED=${SEED:-1}
# A test without a GPU fails, and what was carried here is not built again.
export RM_NEEDS_GPU=1 RM_CUDA_BUILD=$D RM_PREBUILT=1 PYTHONPATH=$D/lib
END=$((SECONDS + ${WITHIN:-500})) FAILED=0
mkdir -p "$L" || exit

save() {
  cp "$L/report.txt" "$OUT/" 2>/dev/null
  tar czf "$OUT/logs.tgz" -C "$D" log 2>/dev/null
}
trap save EXIT
trap 'exit 143' TERM

part() { # NAME SECONDS COMMAND…
  local name=$1 limit=$2 begin=$SECONDS left=$((END - SECONDS)) status
  shift 2
  [ "$ONLY" != "  " ] && [ "${ONLY/ $name /}" = "$ONLY" ] && return
  [ -e "$L/$name.done" ] || [ $left -lt 10 ] && return
  [ "$limit" -gt $left ] && limit=$left
  PART=$name timeout -k 5 "$limit" bash -c "$*" >"$L/$name.log" 2>&1 </dev/null
  status=$?
  [ $status = 0 ] && touch "$L/$name.done" || FAILED=1
  printf '%-14s status %-3s %4s s  %s\n' "$name" $status $((SECONDS - begin)) \
    "$(grep -v '^ *$' "$L/$name.log" | tail -1 | cut -c1-140)" | tee -a "$L/report.txt"
  save
}

ops() { # FAMILIES WORDS-BEFORE OPTIONS OP…: all pairs at once
  local families=$1 before=$2 options=$3
  shift 3
  for op in "$@"; do for f in $families; do echo "$op $f"; done; done | xargs -P 14 -L 1 sh -c '
    timeout 100 '"$before"' $D/checkops_gpu --op $0 --isa cuda_$1 --seed $SEED '"$options"' \
      >$L/$PART-$1-$0.txt 2>&1 && echo "ok  $0 $1" ||
      { echo "BAD $0 $1 $?"; tail -n 3 $L/$PART-$1-$0.txt; }
  ' | sort | tee "$L/each.txt"
  ! grep -q BAD "$L/each.txt"
}
export -f ops

# Where the time of a prefill and a decode step of four layers goes on the processor, by op. Other
# builds of the package, in $D/lib-*, are measured beside the one in $D/lib.
profiles() { # THREADS MODEL LIB…
  local threads=$1 model=$2 lib
  shift 2
  set -o pipefail
  for lib in "$@"; do
    PYTHONPATH=$D/$lib $PY -m rollmesh bench "$L/$model.json" --batch 64 --threads "$threads" \
      --profile | sed "s/^/$lib $threads $model  /"
  done
}
cpu_profile() {
  $PY -c 'import json, os, benchmarks.shapes
for s in benchmarks.shapes.SHAPES.values():
    config = s.config() | {"num_hidden_layers": 4, "vocab_size": 32768}
    json.dump(config, open(os.environ["L"] + f"/{s.name}.json", "w"))' || return
  local builds
  builds=$(cd "$D" && ls -d lib lib-* 2>/dev/null)
  profiles "$(nproc)" dense-0.6b $builds
  profiles "$(nproc)" moe-1b $builds
  profiles $(($(nproc) / 2)) dense-0.6b $builds
  profiles 1 dense-0.6b lib
}
export -f profiles cpu_profile
export PY

FMA=${FMA:-gemm gemm_swiglu attention qk_rope_kv lm_head delta_net rms_norm router permute \
  static_dispatch combine sample embed gather_rows activate head_squares sigmoid_gate \
  merge_pairs top_logprobs ranks pack}
MMA=${MMA:-gemm gemm_swiglu attention lm_head qk_rope_kv router embed pack}
FIGURES="$PY -m benchmarks.gpu --built $D --limits $L/limits.json --rounds 3 --budget 3"
FIGURES="$FIGURES --families cuda_mma"
PYTEST="$PY -m pytest -p no:cacheprovider -W default -q -m 'not slow' --durations=8 --maxfail=40"
T=tests/gpu

part card 20 "cat $D/commit; nvidia-smi; nvidia-smi -q -d CLOCK,POWER,PERFORMANCE | head -70
  uname -a; nproc; free -g
  $PY -m pip list 2>/dev/null | grep -iE '^(torch|numpy|transformers|pytest|nvidia-(nccl|cublas))'
  true"
part runs 40 "$D/probe_mma; $PY -m rollmesh doctor"
# Builds here if the carried programs do not run with this machine's libraries.
grep -qs "P3 digest" "$L/runs.log" && grep -q "CUDA kernels .*librollmesh_cuda" "$L/runs.log" ||
  part build 200 "$SELF build && $D/probe_mma"
part wgmma 25 "$D/bench_wgmma"
part bits-mma 80 "ops mma '' '' $MMA &&
  ops 'mma_tile0 mma_tile1 mma_tile2 mma_tile3' '' '--trials 100' gemm gemm_swiglu &&
  $D/check_gpu mma_company $SEED"
part bits-fma 80 "ops fma '' '' $FMA"
part decode-8b 75 "$FIGURES limits decode --shapes dense-8b --sequences 1,8,64,128 \
  --most dense-8b=128 --context 1024 --steps 32 --out $L/decode-8b.json"
# Leaves out files that need no card, tests that must run alone, and tests with ranks on one card.
part tests 120 "$PYTEST -n 10 --dist loadscope $T --ignore-glob=$T/test_nccl*.py \
  --ignore=$T/test_gpu_benchmarks.py --ignore=$T/test_exchanged.py --ignore=$T/test_device_comm.py \
  -k 'not simt and not gives_everything_back and not gpu_gives and not ranks_replay'"
part prefill 50 "$FIGURES prefill --shapes dense-8b,moe-30b-a3b --prefill 512,2048,8192 \
  --out $L/prefill.json"
part decode-moe 50 "$FIGURES decode --shapes moe-30b-a3b --sequences 1,8,64,128 --context 1024 \
  --steps 32 --out $L/decode-moe.json"
part company 50 "$FIGURES bits --shapes dense-0.6b,moe-30b-a3b --company 2,7,64,256 \
  --out $L/company.json"
part ops 60 "$D/bench_mma mma"
# torch's NCCL may be older than 2.30.3, and then ranks cannot share a card. A copy in $D/nccl,
# built by `make src.lib ONLY_FUNCS="AllGather * *|SendRecv"` for this architecture, has 4 MB.
# torch finds its own NCCL by its RPATH, then loads it again by path: both variables are needed.
[ -e "$D/nccl" ] && part nccl 75 "export NCCL_MAX_CTAS=4 CUDA_DEVICE_MAX_CONNECTIONS=32 \
  CUDA_MODULE_LOADING=EAGER NCCL_DEBUG=INFO NCCL_DEBUG_FILE=$L/nccl-%p.txt NCCL_IB_DISABLE=1 \
  LD_PRELOAD=$D/nccl/nvidia/nccl/lib/libnccl.so.2 PYTHONPATH=$D/lib:$D/nccl
  $PYTEST -v -rs -o faulthandler_timeout=15 -m 'not slow and not full and not processes' \
  --maxfail=3 $T/test_nccl_engine.py $T/test_nccl_replicas.py $T/test_cuda_families.py \
  $T/test_cuda_engine.py -k 'nccl or ranks_replay or gives_everything_back'"
part grpo 45 "$PY -m rollmesh grpo configs/qwen3_debug.toml --device cuda --out $D/grpo \
  --set train.steps=10"
part parity 60 "RM_TEST_DEVICE=cuda RM_TEST_ISA=cuda_mma $PYTEST -n 8 tests/model/test_parity.py \
  -k bfloat16"
# Decode with a much larger max_model_len than needed.
part long 30 "$FIGURES decode --shapes dense-8b --sequences 1,64 --most dense-8b=64 --context 1024 \
  --steps 32 --set max_model_len=40960 --out $L/long.json"
# One decode step of one layer: the prefill before it launches nine of these kernels. A kernel takes
# half a second, because it runs once for each group of counters.
part profile 40 "ncu --clock-control none --section SpeedOfLight --print-summary per-kernel \
  --kernel-name-base demangled -s 9 -c 14 \
  -k 'regex:(few|rows|add|split|merge|norm|rope|logits|sample|embed|squares)_kernel' \
  $FIGURES decode --shapes dense-8b --layers dense-8b=1 --sequences 1 --context 1024 --steps 8 \
  --rounds 1 --set enforce_eager=True"
part profile-sync 45 "ncu --clock-control none --section SpeedOfLight --section WarpStateStats \
  --kernel-name-base demangled -k 'regex:pack_kernel' -s 4 -c 6 $FIGURES sync --shapes dense-0.6b \
  --rounds 1"
part counters 60 "for name in '8B qkv rows=1 ' '8B o rows=64' 'attention seqs=8' 'lm_head rows=64' \
  '8B down rows=4096'; do ncu --clock-control none --section SpeedOfLight --section WarpStateStats \
  --section MemoryWorkloadAnalysis --section Occupancy -s 2 -c 2 --kernel-name-base demangled \
  -k 'regex:(few|rows|gemm|split|tile|logits)_kernel' $D/bench_mma mma \"\$name\"; done"
part memcheck 70 "ops mma 'compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 5' \
  --touch gemm gemm_swiglu attention lm_head router qk_rope_kv"
part racecheck 70 "ops mma 'compute-sanitizer --tool racecheck --error-exitcode 9 --print-limit 5' \
  --touch gemm attention lm_head gemm_swiglu"
part gemm 60 "$FIGURES gemm --shapes dense-8b --gemm-rows 1,2,3,7,16,64,255,1024 --out $L/gemm.json"
part sync 60 "$FIGURES sync start --shapes dense-8b,dense-0.6b --out $L/sync.json"
part decode-fma 60 "${FIGURES/cuda_mma/cuda_fma} decode prefill --shapes dense-8b --sequences 1,64 \
  --prefill 512 --out $L/decode-fma.json"
# The processor beside the card may have no figures yet.
part cpu-bits 60 "$D/checkops --elements 100000000 --seconds 30"
part cpu-profile 90 "cpu_profile"
part cpu-tests 150 "$PYTEST -n 14 --dist loadfile -m 'not full and not slow' tests --ignore=$T \
  --ignore=tests/docs"
part cpu-suite 120 "$PY -m benchmarks.cpu --rounds 2 --budget 5 --points 'decode 1' \
  --points 'decode 8' --points 'decode 64' --points 'prefill 512' --json $L/cpu.json"
cat "$L/report.txt"
exit $FAILED
