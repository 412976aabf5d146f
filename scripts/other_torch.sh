#!/usr/bin/env bash
# The engine tests on another torch than that of constraints.txt, in a virtual environment of its own.
#
#     scripts/other_torch.sh oldest|newest|VERSION [FOLDER]
#
# `oldest` is the oldest that pyproject.toml allows, `newest` the newest that pip finds. FOLDER (build/torch-WHICH by
# default) is kept, and a torch of that version that it has already stays. PyPI's wheel for Linux brings gigabytes of
# CUDA, so this is no part of `make test`. All else is as in constraints.txt, except NumPy: the interpreter of the oldest
# torch's Triton, which runs kernels where there is no GPU, fails with NumPy 2.4 and later.
set -euo pipefail
cd "$(dirname "$0")/.."
which=${1:?oldest, newest or a version}
folder=${2:-build/torch-$which}

test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
python=$folder/bin/python
case $which in
  oldest) version=$(sed -n 's/^  "torch>=\(.*\)",$/\1/p' pyproject.toml).0 ;;
  newest) version=$("$python" -m pip index versions torch 2> /dev/null | sed -n 's/^torch (\(.*\))$/\1/p') ;;
  *) version=$which ;;
esac
"$python" -m pip install --quiet --no-deps --requirement <(grep -Ev '^(torch|numpy)==' constraints.txt) 'numpy<2.4'
"$python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$version')" 2> /dev/null ||
  "$python" -m pip install --quiet "torch==$version"
"$python" -c "import torch; print('torch', torch.__version__)"
PYTHONPATH=$PWD "$python" -m pytest -q -n auto --dist loadfile tests/engines \
  tests/runtime/test_cross_memory.py tests/runtime/test_cores.py tests/runtime/test_changed_weights.py
