#!/usr/bin/env bash
# Every number of docs/benchmarks.md that compares with other engines, in about eight minutes on two
# quiet cores. PLANS holds smollm2-w4.plan, smollm2-w8a16.plan and, if wanted, qwen0.5b-w4.plan and
# qwen1.5b-w4.plan; MODELS qwen2.5-coder-0.5b.gguf and -1.5b.gguf; PROMPTS spec_bench.jsonl and
# humaneval.jsonl. Tables go to OUT/tables.md, all samples to OUT/*.json.
set -euo pipefail
if [ $# -ne 4 ]; then
  echo "usage: $0 PLANS MODELS PROMPTS OUT" >&2
  exit 2
fi
plans=$1 models=$2 prompts=$3 out=$4
here=$(dirname "${BASH_SOURCE[0]}")
python=${PYTHON:-$here/../.venv/bin/python}
mkdir -p "$out"
: > "$out/tables.md"

baselines() { # name, model, plan, options
  local name=$1 model=$2 plan=$plans/$3
  shift 3
  if [ ! -d "$plan" ]; then
    echo "no $plan: $name is left out" >&2
    return
  fi
  printf '\n### %s\n\n' "$name" >> "$out/tables.md"
  "$python" "$here/baselines.py" "$model" "$plan" --json "$out/$name.json" "$@" \
    >> "$out/tables.md"
}

plain=(--modes llama.cpp:ar,fulcrum:ar --max-prompt-tokens 160 --threads 1,2)
lookup=(--modes llama.cpp:ar,llama.cpp:lookup2,llama.cpp:lookup10,fulcrum:ar,fulcrum:off,fulcrum:spec,fulcrum:ngram8
  --prompts "$here/prompts_lookup.jsonl" --threads 2)
others=(--modes llama.cpp:ar,transformers:ar,transformers:lookup10,fulcrum:ar,fulcrum:spec
  --prompts "$here/prompts_lookup.jsonl" --threads 2 --new-tokens 32)
general=(--even --prompts "$prompts/spec_bench.jsonl")
code=(--even --prompts "$prompts/humaneval.jsonl")
small=$models/qwen2.5-coder-0.5b.gguf large=$models/qwen2.5-coder-1.5b.gguf

baselines plain-smollm2-135m smollm2-135m smollm2-w4.plan "${plain[@]}" "${general[@]}" --minutes 0.6
baselines plain-qwen-0.5b "$small" qwen0.5b-w4.plan "${plain[@]}" "${code[@]}" --minutes 0.9
baselines plain-qwen-1.5b "$large" qwen1.5b-w4.plan "${plain[@]}" "${code[@]}" --minutes 1.2 --new-tokens 32
baselines lookup-smollm2-135m smollm2-135m smollm2-w4.plan "${lookup[@]}" --minutes 1
baselines lookup-qwen-0.5b "$small" qwen0.5b-w4.plan "${lookup[@]}" --minutes 1.5 --new-tokens 48
baselines others-smollm2-135m smollm2-135m smollm2-w4.plan "${others[@]}" --minutes 0.6

printf '\n### overhead\n\n' >> "$out/tables.md"
"$python" "$here/session_overhead.py" "$plans/smollm2-w4.plan" "$plans/smollm2-w8a16.plan" \
  --steps 32 --json "$out/overhead.json" >> "$out/tables.md"
cat "$out/tables.md"
