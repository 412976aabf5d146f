#!/usr/bin/env bash
# Everything about a GPU that tests without one cannot show, in ten minutes: see scripts/gpu_acceptance/__main__.py.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=$PWD exec "${PYTHON:-python3}" -m scripts.gpu_acceptance "$@"
