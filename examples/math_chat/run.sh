#!/usr/bin/env bash
# A tiny chat model learns to answer in the form that is asked for. Three minutes on two CPU cores. Everything lands in runs/math_chat, which is made anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
example=examples/math_chat

run() {
  printf '\n\033[1m$ %s\033[0m\n' "$*"
  "$@"
}

run rm -rf runs/math_chat
run python "$example/task.py" runs/math_chat
run hflow exec "$example/sft.yaml" --run-dir runs/math_chat/sft
run hflow exec "$example/math_chat.yaml" --run-dir runs/math_chat/grpo
run hflow samples runs/math_chat/grpo --limit 6
run python "$example/check.py" runs/math_chat/grpo
