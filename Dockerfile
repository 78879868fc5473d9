# Tandem on NVIDIA GPUs. torch's wheels bring CUDA, so that the host needs the driver and the NVIDIA Container Toolkit alone.
#   docker build -t tandem .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/tandem/runs" -v tandem-cache:/root/.cache tandem bash run_pretrain.sh recipes/fineweb_d12.yaml
FROM python:3.12-slim
# torch.compile builds its kernels with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /tandem
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY pipeline pipeline
RUN python -m venv .venv && .venv/bin/pip install --no-cache-dir -e ".[gpu]" -c constraints.txt
# The scripts use an active environment as it is.
ENV VIRTUAL_ENV=/tandem/.venv PATH=/tandem/.venv/bin:$PATH
COPY . .
CMD ["bash", "run_pretrain.sh"]
