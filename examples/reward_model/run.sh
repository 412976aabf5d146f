#!/usr/bin/env bash
# A reward model from pairs, then PPO on what it says; the true score is measured by the rule of the task.
# Everything lands in runs/reward_model (or the folder that is given), which is made anew. One worker, within this
# process: minutes on two CPU cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${1:-runs/reward_model}
here=examples/reward_model
one=(--cluster local1 --workers inline)

run() {
  printf '\n\033[1m$ %s\033[0m\n' "$*"
  "$@"
}

run rm -rf "$runs"
run python $here/task.py "$runs/data"
run hflow new-model "$runs/model" --layers 2 --hidden 64 --heads 4 --ffn 128 --alphabet 'abcdefgh>'
run hflow exec $here/sft.yaml "${one[@]}" --run-dir "$runs/sft" \
  --set params.data="$runs/data/demonstrations.jsonl" --set params.model="$runs/model"
run hflow exec $here/reward.yaml "${one[@]}" --run-dir "$runs/reward" \
  --set params.data="$runs/data/pairs.jsonl" --set params.model="$runs/sft/export/actor"
run hflow exec $here/ppo.yaml "${one[@]}" --run-dir "$runs/ppo" \
  --set params.data="$runs/data/pairs.jsonl" --set params.model="$runs/sft/export/actor" \
  --set params.reward_model="$runs/reward/export/reward"
run python $here/check.py "$runs"
