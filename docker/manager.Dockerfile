# The manager's VM. Build from the root of the project:
#   docker build -f docker/manager.Dockerfile -t spot-manager .
# Needs no torch and no accelerator: the manager decides, the keeper holds bytes. It buys, so it has
# the packages of both clouds.
FROM python:3.11.13-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/spot

# What others wrote changes seldom and comes first, so that a new version of ours is a small layer.
COPY pyproject.toml docker/requirements.py ./
RUN python requirements.py pyproject.toml --without torch --extra aws --extra azure > requirements.txt \
    && pip install --requirement requirements.txt

COPY README.md LICENSE ./
COPY agent agent
COPY bidding bidding
COPY cloud cloud
COPY orchestrator orchestrator
RUN pip install --no-deps .

COPY docker/manager.sh /usr/local/bin/manager

RUN useradd --uid 10001 --create-home spot \
    && install --directory --owner spot --group spot --mode 0700 /var/lib/spot
USER spot
WORKDIR /var/lib/spot
VOLUME /var/lib/spot

HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["orchestrator", "status", "--json"]
ENTRYPOINT ["/usr/local/bin/manager"]
