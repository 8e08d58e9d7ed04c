# The daemon as an image, with Ray inside, in two variants:
#
#   docker build --target cuda -t serve-llm:cuda .
#   docker build --target cpu -t serve-llm:cpu .     the smaller one, if torch's CPU wheels are found:
#                                                    add --build-arg PIP_EXTRA_INDEX_URL=<index of CPU wheels>
#
#   docker run --gpus all --ipc host -p 8000:8000 -v "$HOME/.cache/huggingface:/home/serve/.cache/huggingface" \
#     serve-llm:cuda <model>
#
# torch's wheels bring the CUDA runtime, so one slim base serves both; the driver comes from the host. Secrets are given
# when the container runs (-e HF_TOKEN, -e SERVE_LLM_API_KEY), never here: a layer keeps what it was built with.

FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY serve_llm serve_llm
COPY cli cli
COPY common common
COPY server server
COPY engine engine
COPY kernels kernels
ARG PIP_EXTRA_INDEX_URL=""
# All nodes of a cluster need the same Ray; the manifests in deploy/kuberay name it as rayVersion. KubeRay's probes need
# the extra `default`, a RayService the extra `serve`.
ARG RAY_VERSION=2.60.0
RUN python -m venv /opt/serve-llm \
  && /opt/serve-llm/bin/pip install --no-cache-dir ".[ray]" "ray[default,serve]==${RAY_VERSION}"

FROM python:3.11-slim-bookworm AS runtime
# wget: KubeRay's readiness probe of a RayService's workers runs it in the container.
RUN apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home serve && install --directory --owner=serve /home/serve/.cache/huggingface
COPY --from=build /opt/serve-llm /opt/serve-llm
COPY examples /opt/serve-llm/examples
WORKDIR /home/serve
# SERVE_LLM_HOST: other machines are let in, since the container decides which ports they reach. RAY_worker_niceness: Ray
# would run its workers at nice 15.
ENV PATH=/opt/serve-llm/bin:$PATH \
  PYTHONSAFEPATH=1 \
  SERVE_LLM_HOST=0.0.0.0 \
  RAY_USAGE_STATS_ENABLED=0 \
  RAY_worker_niceness=0
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=30m CMD ["python", "-m", "serve_llm.cli.container_health"]
ENTRYPOINT ["serve-llm"]
CMD ["demo"]

FROM runtime AS cuda
# gcc: Triton compiles the launchers of its kernels. The rest: NCCL speaks InfiniBand and RoCE through it.
RUN apt-get update \
  && apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers librdmacm1 \
  && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER serve

FROM runtime AS cpu
USER serve
