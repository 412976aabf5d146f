#!/usr/bin/env bash
# A model that cannot add learns to: random weights, supervised warm-up, then GRPO on exact answers.
# Everything lands in runs/demo, which is made anew. Under four minutes on two CPU cores.
# CLUSTER: a cluster file, or the name of a shipped one; by default two workers on this machine's CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
cluster=${CLUSTER:-local}

run() {
  printf '\n\033[1m$ %s\033[0m\n' "$*"
  "$@"
}

run rm -rf runs/demo
run hflow new-model runs/demo/model --layers 3 --hidden 128 --heads 4 --ffn 352 --alphabet '0123456789+='
run hflow exec algorithms/sft.yaml --cluster "$cluster" --set params.model=runs/demo/model --run-dir runs/demo/sft
run hflow exec algorithms/grpo.yaml --cluster "$cluster" --set params.model=runs/demo/sft/export/actor \
  --run-dir runs/demo/grpo
run python scripts/check_model.py algorithms/grpo.yaml \
  runs/demo/model runs/demo/sft/export/actor runs/demo/grpo/export/actor
