# The program on NVIDIA's PyTorch image, whose torch, triton, CUDA libraries and flash-attn are kept as they are.
#
#   docker build -t app-finetune . && mkdir -p runs
#   docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" \
#     -v "$PWD/runs:/workspace/app/runs" -v app-cache:/cache app-finetune recipe=lora
#
# Everything else is in docs/many-gpus.md. Written where no image could be pulled or built: it has not been built yet.
ARG NGC_TAG=26.06-py3
FROM nvcr.io/nvidia/pytorch:${NGC_TAG}

ARG NGC_TAG
LABEL org.opencontainers.image.title="app-finetune" \
      org.opencontainers.image.description="Fine-tune language models: full, LoRA and QLoRA, from one entry point" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.base.name="nvcr.io/nvidia/pytorch:${NGC_TAG}"

# The file exists in the base image, filled in some releases and empty in others; the installation renews it.
ENV PIP_CONSTRAINT=/etc/pip/constraint.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY app app
COPY conf conf
COPY scripts/image scripts/image
# Ubuntu's Python asks for that word before it lets pip in; NVIDIA's packages are kept by the script.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore python scripts/image/install.py \
    && python scripts/image/check.py

# Any other user works too (docker run --user): what is written goes to the two volumes.
ARG UID=10001
RUN useradd --uid "${UID}" --non-unique --home-dir /cache --no-create-home --shell /bin/bash trainer \
    && mkdir -p /cache /workspace/app/runs \
    && chown trainer /cache /workspace/app/runs \
    && chmod 1777 /cache /workspace/app/runs
WORKDIR /workspace/app
# For several machines: docs/clusters.md.
COPY scripts/cluster scripts/cluster
USER ${UID}

# Five steps on the CPU, with everything that a run does. Here, so that its caches do not stay.
RUN HOME=/tmp/tried HF_HUB_OFFLINE=1 python -m app.train debug=fast output_dir=/tmp/tried/run \
    && rm -r /tmp/tried

# USER and LOGNAME: parts of torch ask for the user's name, which a number given by --user does not have.
ENV HOME=/cache \
    APP_PYTHON=python \
    USER=trainer \
    LOGNAME=trainer \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    CUDA_CACHE_PATH=/cache/cuda
VOLUME ["/cache", "/workspace/app/runs"]
STOPSIGNAL SIGTERM
# NVIDIA's script finds the libraries that fit the host's driver, then becomes the program (exec): signals reach it.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "python", "-m", "app.train"]
