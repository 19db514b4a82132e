# The router and its mock workers: docker build -t bidgate . && docker run --rm -p 8001:8001 bidgate serve --mock 4
FROM python:3.11-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/bidgate && python -m venv /opt/build
COPY requirements-runtime.lock requirements-build.lock ./
RUN /opt/bidgate/bin/pip install --require-hashes --only-binary :all: --requirement requirements-runtime.lock \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: --requirement requirements-build.lock
COPY pyproject.toml README.md LICENSE ./
COPY service service
COPY loadgen loadgen
# The load generator's own dependencies are left out, so its command goes too.
RUN /opt/build/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/bidgate/bin/pip install --no-deps /wheels/*.whl \
    && rm /opt/bidgate/bin/bidgate-load

FROM python:3.11-slim
LABEL org.opencontainers.image.title="bidgate" \
      org.opencontainers.image.description="HTTP router for vLLM decode workers with shadow prices" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 bidgate && useradd --uid 10001 --gid bidgate --no-create-home --home-dir /nonexistent bidgate
COPY --from=build /opt/bidgate /opt/bidgate
ENV PATH=/opt/bidgate/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/var/cache/bidgate \
    BIDGATE_SERVER__HOST=0.0.0.0 BIDGATE_SERVER__PORT=8001
# What the controller compiles is kept here. On another kind of processor it is compiled again; where the
# folder cannot be written to, at each start.
RUN install --directory --owner 10001 --group 10001 /var/cache/bidgate
USER 10001:10001
RUN python -c 'from service.control import compile_all; compile_all()'
EXPOSE 8001
# Change the port by BIDGATE_SERVER__PORT, not by a flag, and this follows.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['BIDGATE_SERVER__PORT'] + '/health', timeout=2)"]
ENTRYPOINT ["bidgate"]
CMD ["serve"]
