#!/usr/bin/env bash
# The tests. The first call makes .venv and installs; every further call starts at once.
#
#   bash run_tests.sh            what a newcomer runs: a real case of every promise, within 8 minutes on 2 cores
#   bash run_tests.sh --all      everything but what is run by hand (tests/tiers.py), within half an hour there
#   bash run_tests.sh ARGUMENTS  pytest with these
#
# The first two run on as many processes as there are cores (at most 8), one thread each.
# An active virtual or conda environment is used instead of .venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/accelerate_configs/launch.sh"

case ${1:-} in -h | --help) show_usage "${BASH_SOURCE[0]}" ;; esac
prepare_environment dev
cd "$ROOT"
tier=
case ${1:-} in
  "") tier="not slow and not full" ;;
  --all) tier="not slow" && shift ;;
esac
if [ -n "$tier" ]; then # a file stays on one process: its tests share what is expensive
  set -- -m "$tier" --numprocesses logical --maxprocesses 8 --dist loadfile "$@"
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
exec "$PYTHON" -m pytest "$@"
