# The daemon on a CPU. Build: docker build -t serve-llm .   Run: docker run -p 8000:8000 serve-llm demo
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY serve_llm serve_llm
COPY server server
COPY engine engine
COPY kernels kernels
# Where a CPU build of torch comes from is the builder's choice: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=""
RUN python -m venv /opt/serve-llm && /opt/serve-llm/bin/pip install --no-cache-dir .

FROM python:3.11-slim
COPY --from=build /opt/serve-llm /opt/serve-llm
RUN useradd --create-home serve
USER serve
WORKDIR /home/serve
ENV PATH=/opt/serve-llm/bin:$PATH PYTHONSAFEPATH=1 SERVE_LLM_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s \
  CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=2)"
ENTRYPOINT ["serve-llm"]
CMD ["demo"]
