#!/usr/bin/env bash
# The test suite. The first call makes .venv and installs; every further call starts at once.
#
#   bash run_tests.sh                      one real case of every promise: some minutes
#   bash run_tests.sh --all                everything but what is marked slow, as .ci/run does
#   bash run_tests.sh [pytest arguments]   just those
#
# The first two use as many processes as there are cores (at most 8), one thread each.
# An active virtual or conda environment is used instead of .venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/pipeline/launch/environment.sh"

case ${1:-} in -h | --help) show_usage "${BASH_SOURCE[0]}" ;; esac
prepare_environment dev
cd "$ROOT"
tier=
case $#${1:-} in
0) tier="not slow and not full" ;;
1--all) tier="not slow" ;;
esac
if [[ $tier ]]; then # a file stays on one process: its tests share what is expensive. Not sorted by tests: long files have few
    set -- -m "$tier" --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
exec "$PYTHON" -m pytest "$@"
