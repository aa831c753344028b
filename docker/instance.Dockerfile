# An instance. Build from the root of the project:
#   docker build -f docker/instance.Dockerfile -t spot-instance .
# torch's own wheels bring what they need of CUDA; the driver comes from the machine.
FROM python:3.11.13-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/spot

# What others wrote changes seldom and comes first, so that a new version of ours is a small layer.
COPY pyproject.toml docker/requirements.py ./
RUN python requirements.py pyproject.toml > requirements.txt \
    && pip install --requirement requirements.txt

COPY README.md LICENSE ./
COPY agent agent
COPY bidding bidding
COPY cloud cloud
COPY orchestrator orchestrator
RUN pip install --no-deps .

# Where the first-boot script of every machine looks for Python.
RUN mkdir -p /opt/spot/bin && ln -s /usr/local/bin/python /opt/spot/bin/python

COPY docker/instance.sh /usr/local/bin/instance

RUN useradd --uid 10001 --create-home spot
USER spot
WORKDIR /home/spot

ENTRYPOINT ["/usr/local/bin/instance"]
