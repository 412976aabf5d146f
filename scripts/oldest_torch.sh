#!/usr/bin/env bash
# The engine tests on the oldest torch that pyproject.toml allows, in a virtual environment of its own.
#
#     scripts/oldest_torch.sh [FOLDER]
#
# FOLDER (build/oldest-torch by default) is kept, and a torch of that version that it has already stays. PyPI's wheel
# for Linux brings gigabytes of CUDA, so this is no part of `make test`. All else is as in constraints.txt, except NumPy:
# the interpreter of that torch's Triton, which runs kernels where there is no GPU, fails with NumPy 2.4 and later.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/oldest-torch}
oldest=$(sed -n 's/^  "torch>=\(.*\)",$/\1/p' pyproject.toml)

test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
python=$folder/bin/python
"$python" -m pip install --quiet --no-deps --requirement <(grep -Ev '^(torch|numpy)==' constraints.txt) 'numpy<2.4'
"$python" -c "import torch, sys; sys.exit(not torch.__version__.startswith('$oldest.'))" 2>/dev/null ||
  "$python" -m pip install --quiet "torch~=$oldest.0"
"$python" -c "import torch; print('torch', torch.__version__)"
PYTHONPATH=$PWD "$python" -m pytest -q tests/engines tests/runtime/test_cross_memory.py tests/runtime/test_cores.py
