#!/usr/bin/env bash
# One process of a run, started by torchrun in node.sh; reports its exit code to node.sh before torchrun handles it.
set -euo pipefail

echo $$ >"$APP_NODE_FOLDER/rank-$LOCAL_RANK" # torchrun started a new session, so this is also the process group
kill -0 "$PPID" || exit 1                    # node.sh has already killed torchrun
trap : TERM INT USR1                         # the program handles these; this shell waits for it
code=0
if ((WORLD_SIZE == NODES * LOCAL_WORLD_SIZE)); then
  # torchrun numbers machines by their addresses. Rank 0, which prints, must be on machine 0; torchrun hosts the store.
  export RANK=$((NODE * LOCAL_WORLD_SIZE + LOCAL_RANK)) GROUP_RANK=$NODE
  "$APP_PYTHON" -u -m app.train "$@" || code=$?
else
  printf 'error: PROCESSES=%s on machine %s, but %s machines have %s processes together. Set the same number on all\n' \
    "$LOCAL_WORLD_SIZE" "$NODE" "$NODES" "$WORLD_SIZE" >&2
  code=2
fi
case $code in
  2 | 75 | 130) echo "$code" >"$APP_NODE_FOLDER/code" ;; # user error, saved, Ctrl-C: no restart
esac
((code == 0)) || kill -USR2 "$APP_NODE_PID" || :
exit "$code"
