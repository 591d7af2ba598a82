"""Stands in for a trial where the real one cannot be made to end so: killed for memory, deaf to signals, ...

python -S stand_in.py seed=N output_dir='...' resume=auto      what it does depends on N
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

settings = dict(word.split("=", 1) for word in sys.argv[1:])
FOLDER = Path(settings["output_dir"].strip("'"))


def finish(objective: float | None, status: str = "finished") -> None:
    FOLDER.mkdir(exist_ok=True)
    result = {"status": status, "objective": objective, "steps": 3, "tokens_per_second": 10.0}
    (FOLDER / "result.json").write_text(json.dumps(result))
    if "DEVICE" in os.environ:
        choices = {"device": os.environ["DEVICE"], "compile": os.environ["COMPILE"]}
        (FOLDER / "manifest.json").write_text(json.dumps({"choices": choices}))


def stop_with(code: int) -> None:
    """Requests a stop of the sweep, and stops as requested."""
    asked, passed_on = (signal.SIGINT, signal.SIGINT) if code == 130 else (signal.SIGHUP, signal.SIGTERM)
    signal.signal(passed_on, lambda *_: sys.exit(code))
    os.kill(os.getppid(), asked)
    time.sleep(60)


def be_deaf() -> None:
    """Answers the first Ctrl-C by a second one for the sweep."""
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT))
    os.kill(os.getppid(), signal.SIGINT)
    while True:
        time.sleep(60)


print(f"resume={settings['resume']} compile={settings.get('compile')}", flush=True)
print(f"group={os.environ['WANDB_RUN_GROUP']}", flush=True)
match settings["seed"]:
    case "1" | "2" | "3":
        finish(float(settings["seed"]))
    case "4":
        finish(None)
    case "10":
        sys.exit("error: not today")
    case "11":
        os.kill(os.getpid(), signal.SIGKILL)
    case "12":
        print("the plan")
        finish(None, "dry_run")
    case "13":
        print("error: not on this machine", file=sys.stderr)
        sys.exit(2)
    case "75" | "130":
        sys.exit(int(settings["seed"]))
    case "20" | "21":
        stop_with(130 if settings["seed"] == "20" else 75)
    case "22":
        be_deaf()
