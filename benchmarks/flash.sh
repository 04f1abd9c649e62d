#!/usr/bin/env bash
# Every number of docs/benchmarks.md about weights in flash: a sweep of residency, a draft model
# beside plain decoding under one memory budget, and llama.cpp under the same limit. About an hour
# on two quiet cores, the first compile not counted. MODELS holds qwen2.5-coder-0.5b.gguf and
# -1.5b.gguf. Tables go to OUT/tables.md, plans and all measurements to OUT; plans that are there
# already are taken as they are.
set -euo pipefail
if [ $# -ne 4 ]; then
  echo "usage: $0 MODELS CODE_PROMPTS MIXED_PROMPTS OUT" >&2
  echo "LIMIT_CODE (10), LIMIT_MIX (20), TOKENS (64), RESIDENT (25 percent) are variables" >&2
  exit 2
fi
models=$1 code=$2 mix=$3 out=$4
here=$(dirname "${BASH_SOURCE[0]}")
bin=${BIN:-$here/../.venv/bin}
tokens=${TOKENS:-64} resident=${RESIDENT:-25}
target=$models/qwen2.5-coder-1.5b.gguf draft=$models/qwen2.5-coder-0.5b.gguf
mkdir -p "$out"
: > "$out/tables.md"

flash() { "$bin/python" "$here/flash.py" "$@"; }

compile() { # name, options
  local plan=$out/$1.plan
  shift
  if [ ! -d "$plan" ]; then
    "$bin/plan" compile "$target" --device host --target-format w8a16 --context 1024 -o "$plan" "$@"
  fi
}

bench() { # plan, json, options
  local plan=$out/$1.plan json=$out/$2.json
  shift 2
  "$bin/plan" bench "$plan" --max-new-tokens "$tokens" --repeat 1 --json "$@" > "$json"
}

title() { printf '\n### %s\n\n' "$1" >> "$out/tables.md"; }

compile memory
compile memory-pair --draft "$draft"

sweep=()
while read -r percent budget; do
  if compile "sweep-$percent" --dram-budget "$budget"; then
    bench "sweep-$percent" "sweep-$percent" --modes ar --prompts "$code" --limit 3
    sweep+=("$out/sweep-$percent.plan")
  else
    echo "$percent % resident does not fit and is left out" >&2
  fi
done < <(flash budgets "$out/memory.plan" 0 20 40 60 80 100)
title "Residency"
flash sweep "${sweep[@]}" >> "$out/tables.md"

# One total for all: the draft model is paid for out of the target's share
read -r _ budget < <(flash budgets "$out/memory-pair.plan" "$resident")
compile pair --draft "$draft" --dram-budget "$budget"
compile same-budget --dram-budget "$budget"
compile same-share --dram-budget "$(flash without-draft "$out/pair.plan")"

"$bin/plan" explain "$out/pair.plan" > "$out/pair.txt"
"$bin/plan" verify "$out/pair.plan" --prompts "$code" --limit 2 --max-new-tokens 32

pair() { # name, prompts, limit
  bench pair "pair-$1" --modes "$(flash modes "$out/pair.plan")" --prompts "$2" --limit "$3" \
    --rival "$out/same-budget.plan" --rival "$out/same-share.plan"
  title "Pair, $1"
  flash pair "$out/pair-$1.json" "$1" >> "$out/tables.md"
  bench memory-pair "memory-$1" --modes ar,chain4,chain8,spec --prompts "$2" --limit "$3"
  title "Pair in memory, $1"
  flash pair "$out/memory-$1.json" "$1" >> "$out/tables.md"
}
pair code "$code" "${LIMIT_CODE:-10}"
pair mix "$mix" "${LIMIT_MIX:-20}"

# Both under a limit of the system: llama.cpp maps the file, and its pages come and go
limited() { "$bin/python" "$here/memory_limit.py" "$budget" -- "$@"; }
if [ -f "$here/memory_limit.py" ]; then
  title "llama.cpp with mmap, and the pair, limited to $budget bytes"
  limited "$bin/python" "$here/flash_llama.py" "$target" --prompts "$code" --limit 3 \
    --new-tokens "$tokens" >> "$out/tables.md"
  limited "$bin/plan" bench "$out/pair.plan" --modes ar,spec --prompts "$code" --limit 3 \
    --max-new-tokens "$tokens" --repeat 1 >> "$out/tables.md"
fi
cat "$out/tables.md"
