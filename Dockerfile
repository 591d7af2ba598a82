# syntax=docker/dockerfile:1
# The program on NVIDIA's PyTorch image, whose torch, triton and attention kernels are kept as they are.
#
#   docker build -t app-finetune .
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/workspace/app/runs" -v app-cache:/cache app-finetune recipe=lora
#
# Written where no image could be built or pulled: it has not been built yet.
ARG NGC_TAG=26.06-py3
FROM nvcr.io/nvidia/pytorch:${NGC_TAG}

# The image states its own versions there; pip must not go against them in any step below.
ENV PIP_CONSTRAINT=/etc/pip/constraint.txt \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY app app
COPY conf conf

# Our pins, less what the image has or constrains itself. Then proof that nothing of the image was replaced.
RUN <<'SCRIPT'
set -eu
kept='^(torch|triton|nvidia|pytorch|flash|transformer_engine)'
python -m pip list --format=freeze | grep -iE "$kept" | sort >/tmp/before
python - <<'PYTHON'
import pathlib, re
from importlib.metadata import distributions

def name(text):
    return re.sub(r"[-_.]+", "-", re.split(r"[\s=<>!~;@\[]", text.strip(), maxsplit=1)[0]).lower()

theirs = {name(d.metadata["Name"]) for d in distributions()}
limits = pathlib.Path("/etc/pip/constraint.txt")
if limits.exists():
    theirs |= {name(line) for line in limits.read_text().splitlines()}
pins = pathlib.Path("constraints.txt").read_text().splitlines()
ours = [line for line in pins if "==" in line and name(line) not in theirs and not line.startswith("#")]
pathlib.Path("/tmp/pins.txt").write_text("\n".join(ours) + "\n")
PYTHON
python -m pip install -c /tmp/pins.txt ".[tensorboard]"
python -m pip list --format=freeze | grep -iE "$kept" | sort >/tmp/after
diff /tmp/before /tmp/after
cd / && python -c "import app, bitsandbytes, peft, transformers"
rm -rf /tmp/pins.txt /tmp/before /tmp/after
SCRIPT

# Any other user works too (docker run --user): what is written goes to the two volumes.
ARG UID=10001
RUN useradd --uid ${UID} --create-home --shell /bin/bash trainer \
    && mkdir -p /cache /workspace/app/runs \
    && chown trainer /cache /workspace/app /workspace/app/runs \
    && chmod 1777 /cache /workspace/app/runs
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
WORKDIR /workspace/app
USER trainer
VOLUME ["/cache", "/workspace/app/runs"]
ENTRYPOINT ["python", "-m", "app.train"]
