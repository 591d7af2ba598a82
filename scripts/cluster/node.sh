#!/usr/bin/env bash
# One machine of a multi-node run: torchrun starts the processes, and restarts them if one fails.
#
#   NODES=2 NODE=0 RENDEZVOUS=gpu1:29400 RUN_ID=first scripts/cluster/node.sh output_dir=/shared/runs/mine recipe=lora
#
# NODES, NODE      number of machines, and index of this one, from 0, where rank 0 runs and prints; srun sets both
# RENDEZVOUS       host:port on machine 0
# RUN_ID           the same on all machines; another one if an earlier start may still be ending
# ADDRESS          host name of this machine for the others, if it is not that of Slurm or hostname
# PROCESSES        number of processes per machine, or gpu for one per GPU (the default)
# RESTARTS         number of restarts after failures (default: 3)
# MORE_RENDEZVOUS  for torchrun's --rdzv-conf, e.g. join_timeout=600, the seconds that machines wait for each other
#
# Arguments go to finetune train, after resume=auto. On SIGTERM, SIGUSR1 or Ctrl-C the run saves, and ends on all
# machines. The exit code is the run's (75: saved), else torchrun's.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
NODE=${NODE:-${SLURM_NODEID:-}} NODES=${NODES:-${SLURM_NNODES:-}}
missing=()
for name in NODES NODE RENDEZVOUS RUN_ID; do
  [[ ${!name:-} ]] || missing+=("$name")
done
if ((${#missing[@]})); then
  printf 'error: %s: not set. The comments at the top of %s explain each variable\n' "${missing[*]}" "$0" >&2
  exit 2
fi
restarts=${RESTARTS:-3}

export APP_PYTHON=${APP_PYTHON:-$root/.venv/bin/python}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set it with a warning; the program counts the cores itself
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # with a shared store, a returning machine waits forever (torch 2.13)
export NODES NODE APP_NODE_PID=$$ APP_NODE_FOLDER
APP_NODE_FOLDER=$(mktemp -d)
trap 'rm -rf "$APP_NODE_FOLDER"' EXIT

agent=""  # torchrun
asked=""  # the run was asked to stop
over=""   # this script killed torchrun
woken=""  # a signal interrupted the wait for torchrun

say() { printf 'node %s: %s\n' "$NODE" "$*" >&2; }

# Send a signal to the process groups of this machine; signal 0 checks whether there are any.
to_ranks() {
  local file found=1
  for file in "$APP_NODE_FOLDER"/rank-*; do
    [[ -f $file ]] && kill "-$1" -- "-$(<"$file")" 2>/dev/null && found=0
  done
  return $found
}

# On SIGTERM, it would give saving processes 30 seconds.
end_agent() {
  over=1
  [[ -z $agent ]] || kill -KILL "$agent" 2>/dev/null || :
}

stop() {
  woken=1 asked=1
  to_ranks TERM || end_agent
}

# A process has ended: end the run if it was asked to stop, or if a restart would end in the same way.
ended() {
  woken=1
  [[ -z $asked && ! -f $APP_NODE_FOLDER/code ]] || end_agent
}
trap stop TERM INT USR1
trap ended USR2

# Sets `code`.
run_torchrun() {
  (
    trap '' USR1 # some clusters send it to all processes of a job
    exec "$APP_PYTHON" -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="${PROCESSES:-gpu}" \
      --max-restarts="$restarts" --rdzv-backend=c10d --rdzv-id="$RUN_ID" --rdzv-endpoint="$RENDEZVOUS" \
      --rdzv-conf="is_host=$((NODE == 0))${MORE_RENDEZVOUS:+,$MORE_RENDEZVOUS}" \
      --local-addr="${ADDRESS:-${SLURMD_NODENAME:-$(hostname)}}" \
      --no-python "$root/scripts/cluster/rank.sh" resume=auto "$@"
  ) &
  agent=$!
  while woken="" code=0; do
    wait "$agent" 2>/dev/null || code=$?
    [[ $woken ]] || break
  done
  agent=""
}

# Kill processes without torchrun, after some seconds to end by themselves.
end_ranks() {
  local end=$((SECONDS + ${1:-0}))
  while to_ranks 0 && ((SECONDS < end)); do sleep 0.1 || :; done
  to_ranks KILL || :
  rm -f "$APP_NODE_FOLDER"/rank-*
}

while run_torchrun "$@"; do
  end_ranks "${over:+20}"
  if [[ $over || $asked ]] || ((code <= 128 || restarts == 0)); then break; fi
  restarts=$((restarts - 1))
  say "torchrun was killed by signal $((code - 128)). Starting it again to rejoin the others"
done
if [[ -f $APP_NODE_FOLDER/code ]]; then
  code=$(<"$APP_NODE_FOLDER/code")
elif [[ $asked ]] && ((code)); then
  say "Stopped as requested. Resume from the last checkpoint"
  code=143
fi
exit "$code"
