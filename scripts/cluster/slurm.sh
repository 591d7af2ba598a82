#!/usr/bin/env bash
# A multi-node run with Slurm. Adapt the lines below to your cluster, then run in the folder of the program:
#
#   scripts/setup && sbatch scripts/cluster/slurm.sh output_dir=/shared/runs/mine recipe=qlora model=llama ...
#
# Before the time limit the run saves, and the job is requeued and resumed; also after a machine failure.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

root=${APP_ROOT:-$SLURM_SUBMIT_DIR} # Slurm runs a copy of this file in another folder
[[ -x $root/scripts/cluster/node.sh ]] ||
  fail "$root is not the folder of the program. Call sbatch there, or set APP_ROOT=DIR"
[[ " $*" == *" output_dir="* ]] ||
  fail "output_dir= is required, on a disk shared by all machines, e.g. output_dir=/shared/runs/mine"
[[ " $*" != *" resume="* ]] || fail "resume= is always auto here. Leave it out"
APP_PYTHON=$("$root/scripts/setup" core)
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export APP_PYTHON RENDEZVOUS="${hosts[0]}:$((20000 + SLURM_JOB_ID % 20000))"
export RUN_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"

# After a machine fails, wait at most a minute for the others; --kill-on-bad-exit=1, which srun with the program itself
# needs, would kill machines that are still saving.
srun --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=0 --wait=60 \
  "$root/scripts/cluster/node.sh" "$@" &
step=$!
asked="" woken=""
pass_on() { # srun forwards USR1 to node.sh on all machines; on SIGTERM it would kill them
  woken=1
  kill -USR1 "$step" 2>/dev/null || :
}
trap 'asked=1; pass_on' USR1
trap pass_on TERM INT
while woken="" code=0; do
  wait "$step" || code=$?
  [[ $woken ]] || break
done

if [[ $asked ]] && ((code == 75)); then
  scontrol requeue "$SLURM_JOB_ID" || printf 'Saved. Submit the same sbatch command to resume.\n' >&2
fi
exit "$code"
