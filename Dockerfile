# The HTTP service with the built-in model:  docker build -t rsrank . && docker run --rm -p 8080:8080 rsrank
# `mini` needs no torch. For language models, with torch:  docker build --build-arg EXTRAS=serve,lm -t rsrank-lm .
FROM python:3.12-slim

ARG EXTRAS="serve"

WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY rsrank_rag rsrank_rag
RUN python -m pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

RUN useradd --create-home --uid 1000 rsrank \
    && install --directory --owner rsrank --mode 700 /hub /prefixes
USER rsrank
ENV HF_HOME=/hub
VOLUME ["/hub", "/prefixes"]

EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["rsrank", "serve", "--host", "0.0.0.0", "--port", "8080"]
CMD ["--model", "mini"]
