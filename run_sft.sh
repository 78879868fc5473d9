#!/usr/bin/env bash
# Stage 2: chat tuning of a pretrained run. The first call makes .venv and installs; every further call starts, or continues the run, at once.
#
#   bash run_sft.sh [RECIPE] [section.key=value ...]      default: recipes/quickstart_sft.yaml
#
# An active virtual or conda environment is used instead of .venv. NPROC=n sets the number of processes; the default is
# one for each GPU that is visible, and one on a CPU. Signals reach the run, which saves and ends; its status is handed on.
# MAX_RESTARTS=n starts a run that crashed again, at most n times and only when it has made progress. Several machines:
# NNODES, NODE_RANK and MASTER_ADDR, on each of them (docs/cluster.md).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/pipeline/launch/environment.sh"

case ${1:-} in -h | --help) show_usage "${BASH_SOURCE[0]}" ;; esac
prepare_environment
exec "$PYTHON" "$ROOT/pipeline/launch/launch.py" "$ROOT/pipeline/sft.py" "$ROOT/recipes/quickstart_sft.yaml" "$@"
