# One file for every backend:
#   docker build --build-arg BACKEND=cpu .          processors
#   docker build --build-arg BACKEND=cu130 .        NVIDIA
#   docker build --build-arg BACKEND=rocm7.2 .      AMD
# torch comes from the index of that backend and brings its libraries along, so the base is small.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
ARG BACKEND=cpu
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
RUN uv venv /opt/everyframe
COPY constraints.txt /src/
# Before our own source: a change there installs no torch again.
RUN VIRTUAL_ENV=/opt/everyframe uv pip install --no-cache --torch-backend "${BACKEND}" \
    --constraint /src/constraints.txt torch
COPY pyproject.toml README.md LICENSE /src/
COPY docs/man /src/docs/man
COPY src /src/src
RUN VIRTUAL_ENV=/opt/everyframe uv pip install --no-cache --torch-backend "${BACKEND}" \
    --constraint /src/constraints.txt "/src[gguf,server]"

FROM python:${PYTHON}-slim-bookworm
# g++ compiles the native kernels on the processor that runs them. Debian's release fixes its version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 everyframe \
    && mkdir -p /models /data \
    && chown everyframe:everyframe /models /data
COPY --from=build /opt/everyframe /opt/everyframe
ENV PATH=/opt/everyframe/bin:$PATH \
    HF_HOME=/models \
    EVERYFRAME_CACHE=/data/cache \
    EVERYFRAME_RUNS=/data/runs \
    EVERYFRAME_SERVER_DIR=/data/server \
    PYTHONUNBUFFERED=1
# By its number, which Kubernetes can check not to be root's.
USER 1000
WORKDIR /data
VOLUME ["/models", "/data"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["everyframe"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
