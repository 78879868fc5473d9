#!/usr/bin/env bash
# The test suite. The first call makes .venv and installs; every further call starts at once.
#
#   bash run_tests.sh [pytest arguments]
#
# An active virtual or conda environment is used instead of .venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/accelerate_configs/launch.sh"

case ${1:-} in -h | --help) show_usage "${BASH_SOURCE[0]}" ;; esac
prepare_environment dev
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
