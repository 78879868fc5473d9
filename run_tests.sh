#!/usr/bin/env bash
# The test suite. The first call makes .venv and installs; every further call starts at once.
#
#   bash run_tests.sh [pytest arguments]
#
# Without arguments the whole suite, on as many processes as there are cores (at most 8), one thread each.
# An active virtual or conda environment is used instead of .venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/accelerate_configs/launch.sh"

case ${1:-} in -h | --help) show_usage "${BASH_SOURCE[0]}" ;; esac
prepare_environment dev
cd "$ROOT"
if (($# == 0)); then # a file stays on one process: its tests share what is expensive
    set -- --numprocesses logical --maxprocesses 8 --dist loadfile
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
exec "$PYTHON" -m pytest "$@"
