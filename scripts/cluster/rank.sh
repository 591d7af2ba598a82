#!/usr/bin/env bash
# One process of a run, started by the torchrun of node.sh, which hears from here how it ended before torchrun knows.
set -euo pipefail

echo $$ >"$APP_NODE_FOLDER/rank-$LOCAL_RANK" # torchrun gave it a session of its own: this is its group as well
kill -0 "$PPID" || exit 1                    # too late: node.sh has ended torchrun meanwhile
trap : TERM INT USR1                         # the program answers these; this shell waits for it
code=0
"$APP_PYTHON" -u -m app.train "$@" || code=$?
case $code in
  2 | 75 | 130) echo "$code" >"$APP_NODE_FOLDER/code" ;; # to be mended, saved as asked, Ctrl-C: not to be tried again
esac
((code == 0)) || kill -USR2 "$APP_NODE_PID" || :
exit "$code"
