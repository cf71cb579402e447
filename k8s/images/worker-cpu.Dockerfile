# A worker on CPUs, with the native kernels built in. Build from the repository's root:
#   docker build -f k8s/images/worker-cpu.Dockerfile -t forwardplane/worker-cpu:0.1.0 .
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

# The compiler stays in this stage.
FROM ${BASE_IMAGE} AS build
# The distribution's own compiler: its version follows the pinned base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE constraints.txt ./
COPY protos protos
COPY worker_svc worker_svc
COPY kernels kernels
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/forwardplane \
    && /opt/forwardplane/bin/pip install --no-cache-dir --constraint constraints.txt --index-url "${TORCH_INDEX_URL}" torch \
    && /opt/forwardplane/bin/pip install --no-cache-dir --constraint constraints.txt ".[worker,tracing]" \
    && /opt/forwardplane/bin/pip uninstall --yes pip setuptools

FROM ${BASE_IMAGE}
COPY --from=build /opt/forwardplane /opt/forwardplane
ENV PATH=/opt/forwardplane/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 50100 50150 9465
ENTRYPOINT ["python3", "-m", "worker_svc"]
