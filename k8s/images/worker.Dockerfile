# A worker on NVIDIA devices. Never built by the project's own tests, which have no CUDA image: linted only.
#   docker build -f k8s/images/worker.Dockerfile -t forwardplane/worker:0.1.0 .
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

# torch brings the CUDA libraries; the driver comes from the node.
FROM ${BASE_IMAGE} AS build
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE constraints.txt ./
COPY protos protos
COPY worker_svc worker_svc
COPY kernels kernels
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130
RUN python3 -m venv /opt/forwardplane \
    && /opt/forwardplane/bin/pip install --no-cache-dir --constraint constraints.txt --index-url "${TORCH_INDEX_URL}" torch \
    && /opt/forwardplane/bin/pip install --no-cache-dir --constraint constraints.txt ".[worker,tracing]" \
    && /opt/forwardplane/bin/pip uninstall --yes pip setuptools

FROM ${BASE_IMAGE}
COPY --from=build /opt/forwardplane /opt/forwardplane
ENV PATH=/opt/forwardplane/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
EXPOSE 50100 50150 9465
ENTRYPOINT ["python3", "-m", "worker_svc"]
