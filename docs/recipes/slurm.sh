#!/bin/bash
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@180
# sbatch slurm.sh algorithms/grpo.yaml --cluster h100x16 --set params.model=models/my-model
#
# The folder in which `sbatch` is called, with the virtual environment in it, is shared by all hosts. SLURM tells
# this script 180 seconds before the time is up: 120 of them are for a checkpoint.

set -euo pipefail
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # a job that is requeued keeps its number
# shellcheck disable=SC1091
source .venv/bin/activate

mkdir -p runs
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/runs/.token-$SLURM_JOB_ID
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")

# A Ray node on each host. Names are resolved where they are needed: on its own host, a name may lead to loopback.
port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
others=$((SLURM_NNODES - 1))
# shellcheck disable=SC2016
join='read -r address _ < <(getent ahostsv4 "$1")
until (: <"/dev/tcp/$address/$2") 2>/dev/null; do sleep 1; done
exec ray start --block --address="$address:$2" --disable-usage-stats'
srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --block --head --port="$port" --include-dashboard=false --disable-usage-stats &
if ((others > 0)); then
  srun --overlap --cpu-bind=none --nodes="$others" --ntasks="$others" --exclude="$head" \
    bash -c "$join" join "$head" "$port" &
fi
count='import ray; ray.init("auto", log_to_driver=False); print(sum(n["Alive"] for n in ray.nodes()))'
for _ in {1..60}; do
  nodes=$(python -c "$count" 2>/dev/null || true)
  [[ $nodes != "$SLURM_NNODES" ]] || break
  sleep 3
done

# The run, or what is left of it.
if [[ -f $run/events.jsonl ]]; then
  set -- --resume "$run"
else
  # A `--set` of yours counts more, and the run keeps all of them.
  set -- --set run.checkpoint.seconds=900 --set run.grace=120 --set run.restarts=3 "$@" --run-dir "$run"
fi
hflow exec "$@" --address auto &
hflow=$!
trap 'kill -TERM "$hflow"' TERM
status=0
wait "$hflow" || status=$?
while kill -0 "$hflow" 2>/dev/null; do # the signal ended the wait, and not yet the run
  status=0
  wait "$hflow" || status=$?
done

kill %1 || true # and with the head its cluster
if ((status == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
