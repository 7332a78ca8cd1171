# A cleaning worker (`slackwater clean run`) and its keeper (`slackwater clean keep`).  No torch.
#
#   docker build -f manifests/images/worker.Dockerfile -t slackwater/worker:0.1.0 .
#
# Stages: `tools` and `packages` change with the locks, `code` with our sources, which are the last and smallest layer.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS tools
COPY .setup/locks/build.lock /locks/
RUN python3 -m venv /tools && \
    /tools/bin/python -m pip install --no-cache-dir --require-hashes --only-binary :all: -r /locks/build.lock

FROM tools AS packages
COPY .setup/locks/workers.lock /locks/
# Without pip: nothing can be installed in a running container.
RUN python3 -m venv --without-pip /opt/slackwater && \
    /tools/bin/python -m pip --python /opt/slackwater/bin/python install \
        --no-cache-dir --require-hashes --only-binary :all: -r /locks/workers.lock && \
    echo /opt/code > "$(/opt/slackwater/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/slackwater.pth"

FROM tools AS code
# Only the interpreter's address is needed, for the first line of the console script.
RUN python3 -m venv --without-pip /opt/slackwater
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY operator/slackwater_operator operator/slackwater_operator
COPY slurm/slackwater_slurm slurm/slackwater_slurm
COPY inference/slackwater_inference inference/slackwater_inference
COPY kernels/slackwater_kernels kernels/slackwater_kernels
COPY workers/slackwater_workers workers/slackwater_workers
RUN /tools/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheel . && \
    /tools/bin/python -m pip --python /opt/slackwater/bin/python install \
        --no-cache-dir --no-deps --no-index --target /opt/code /wheel/*.whl

FROM ${BASE}
# A name for the user: getpass and others ask for one.
RUN echo 'slackwater:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'slackwater:x:65532:' >> /etc/group
COPY --from=packages /opt/slackwater /opt/slackwater
COPY --from=code /opt/code /opt/code
# The root may be read-only: bytecode was compiled above, and whatever wants a home has /tmp.
ENV PATH=/opt/code/bin:/opt/slackwater/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 65532:65532
# The first process of a container is given no signal that it has no handler for.  Blocked, a SIGTERM waits until
# slackwater_operator/start.py lets it through.
ENTRYPOINT ["env", "--block-signal=TERM", "slackwater"]
