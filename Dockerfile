# The proxy and the learner of docker-compose.yml. Engines (vLLM) run beside it, from their own image or on the host.
FROM python:3.12-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends procps \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home swarmq \
 && install -d -o swarmq -g swarmq /runs /home/swarmq/.cache /home/swarmq/.cache/huggingface

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
COPY src ./src
RUN pip install --no-cache-dir -c requirements/tested.txt ".[proxy,learner]"

USER swarmq
WORKDIR /runs
CMD ["swarmq", "--help"]
