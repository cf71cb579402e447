# The scheduler: no torch, no compiler. Build from the repository's root:
#   docker build -f k8s/images/scheduler.Dockerfile -t forwardplane/scheduler:0.1.0 .
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

# Everything that builds stays in this stage.
FROM ${BASE_IMAGE} AS build
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE constraints.txt ./
COPY protos protos
COPY scheduler_svc scheduler_svc
COPY kernels kernels
RUN python3 -m venv /opt/forwardplane \
    && /opt/forwardplane/bin/pip install --no-cache-dir --constraint constraints.txt ".[kubernetes,tracing]" \
    && rm -rf /opt/forwardplane/lib/python3*/site-packages/kernels \
    && /opt/forwardplane/bin/pip uninstall --yes pip setuptools

FROM ${BASE_IMAGE}
COPY --from=build /opt/forwardplane /opt/forwardplane
ENV PATH=/opt/forwardplane/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 50052 8000 9464 9440
ENTRYPOINT ["python3", "-m", "scheduler_svc"]
