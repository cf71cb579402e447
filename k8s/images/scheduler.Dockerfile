# The scheduler: no torch, no compiler. Build from the repository's root:
#   docker build -f k8s/images/scheduler.Dockerfile -t forwardplane/scheduler:0.1.0 .
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

# Everything that builds stays in this stage.
FROM ${BASE_IMAGE} AS build
# The distribution's own strip: its version follows the pinned base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE constraints.txt ./
COPY protos protos
COPY scheduler_svc scheduler_svc
COPY kernels kernels
COPY k8s/images/slim_environment.py .
# tokenizers asks for huggingface_hub, to fetch from there; models come as folders here.
RUN python3 -m venv /opt/forwardplane \
    && /opt/forwardplane/bin/pip install --no-cache-dir --no-compile --constraint constraints.txt ".[kubernetes,tracing]" \
    && rm -rf /opt/forwardplane/lib/python3*/site-packages/kernels \
    && /opt/forwardplane/bin/pip uninstall --yes huggingface_hub hf-xet fsspec filelock tqdm pip setuptools
WORKDIR /
RUN /opt/forwardplane/bin/python3 /source/slim_environment.py scheduler_svc.app scheduler_svc.edge.edge_app \
       scheduler_svc.links.kubernetes_api opentelemetry.exporter.otlp.proto.grpc.trace_exporter

FROM ${BASE_IMAGE}
COPY --from=build /opt/forwardplane /opt/forwardplane
ENV PATH=/opt/forwardplane/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 50052 8000 9464 9440
ENTRYPOINT ["python3", "-m", "scheduler_svc"]
