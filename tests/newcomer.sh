#!/usr/bin/env bash
# Follow pages as a newcomer does who has hflow's wheel and no checkout: in an empty folder, write the files that
# the page shows and run its commands, in order. What `make` does needs the checkout, and GPUs are not here: commands
# with them are left out, or run on one CPU worker. Runs are cut short, and that is said.
#
# tests/newcomer.sh PAGE...   with the packages of .venv that hflow needs, or those of PYTHON=/path/to/python, `build` among them
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The source distribution, and the wheel from it.
"$python" -m build --outdir "$work/dist" "$root" >"$work/build.log" || { cat "$work/build.log" >&2; exit 1; }
"$python" -m pip --quiet --disable-pip-version-check install --no-deps --target "$work/site" "$work"/dist/*.whl
mkdir "$work/bin"
printf '#!/bin/sh\nexec "%s" -m hflow.cli.app "$@"\n' "$python" >"$work/bin/hflow"
chmod +x "$work/bin/hflow"
export PATH="$work/bin:$PATH" PYTHONPATH="$work/site"

for page in "$@"; do
  mkdir -p "$work/follow/$page"
  cd "$work/follow/$page"
  "$python" "$root/tests/follow.py" "$root/$page" >"$work/steps.sh"
  bash -euo pipefail "$work/steps.sh"
  echo "$page was followed to its end"
done
