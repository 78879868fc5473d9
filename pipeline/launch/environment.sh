# Sourced by run_pretrain.sh, run_sft.sh, run_tests.sh and .ci/run: sets PYTHON to a Python that has what
# pyproject.toml asks for. An active environment is used as it is, and only what it lacks is installed into it;
# without one, .venv is made beside this folder and filled once, then again when pyproject.toml or constraints.txt change.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
  echo "$1" >&2
  exit "${2:-66}"
}

# Prints the comment at the head of a script and ends.
show_usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"
  exit 0
}

# Prints the first Python >= 3.11 that can make an environment.
find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python; do
    if "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  return 1
}

# Prints, pinned as in constraints.txt, what the environment of $1 lacks of pyproject.toml (and of its extra $2).
missing_requirements() {
  trap '' INT # Python would print a traceback; who calls this ends when it is back
  "$1" - "$ROOT" "$2" <<'PYTHON'
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

root, extra = Path(sys.argv[1]), sys.argv[2]
project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
wanted = project["dependencies"] + project["optional-dependencies"].get(extra, [])
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
pins = {normal(line.split("==")[0]): line for line in (root / "constraints.txt").read_text().split() if "==" in line}
for line in wanted:
    name = re.match(r"[A-Za-z0-9._-]+", line)[0]
    try:
        from packaging.requirements import Requirement

        lacking = not Requirement(line).specifier.contains(version(name), prereleases=True)
    except (PackageNotFoundError, ImportError):
        lacking = True
    if lacking:
        print(pins.get(normal(name), line))
PYTHON
}

# Sets PYTHON. $1: an extra of pyproject.toml, or nothing.
prepare_environment() {
  trap 'fail "SIGINT came before anything had begun; nothing is lost." 130' INT
  trap 'fail "SIGTERM came before anything had begun; nothing is lost." 75' TERM
  local extra=${1:-} active=${VIRTUAL_ENV:-}
  # conda's base is active on many machines without having been chosen, and everything else stands on it.
  if [ -z "$active" ] && [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-}" != base ]; then
    active=$CONDA_PREFIX
  fi
  if [ -n "$active" ]; then
    use_active_environment "$active" "$extra"
  else
    use_own_environment "$extra"
  fi
  trap - INT TERM
}

use_active_environment() {
  local missing
  PYTHON=$1/bin/python
  [ -x "$PYTHON" ] || fail "$1: the active environment has no bin/python. Deactivate it, or make it anew."
  (trap '' INT && "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))') || # its traceback would say no more
    fail "$1: the active environment has $("$PYTHON" -V 2>&1), but Tandem needs Python 3.11 or newer. Activate one that has it, or none."
  missing=$(missing_requirements "$PYTHON" "$2")
  if [ -n "$missing" ]; then
    echo "installing into the active environment $1:" $missing
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip --upgrade >/dev/null ||
      fail "$1: the active environment has no pip. Install these into it by other means:" $missing
    printf '%s\n' "$missing" | "$PYTHON" -m pip install --quiet --requirement /dev/stdin ||
      fail "$1: installing failed. Mend what pip says above, then run the same command again." 69
  fi
}

use_own_environment() {
  local extra=$1 python wanted stamp
  PYTHON=$ROOT/.venv/bin/python
  wanted=$(cksum "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cut -d' ' -f1,2)
  # An environment with the extra also serves those who need none.
  for stamp in "$ROOT"/.venv/.installed-*; do
    case $stamp in *-"$extra" | *-dev) [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return ;; esac
  done
  python=$(find_python) ||
    fail "Tandem needs Python 3.11 or newer with its venv module; found $(python3 -V 2>&1 || echo none). Install one (on Debian and Ubuntu: python3-venv), then run the same command again."
  if ! "$PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    echo "making $ROOT/.venv with $("$python" -V)"
    "$python" -m venv --clear "$ROOT/.venv" || fail "$ROOT/.venv: the environment could not be made." 73
  fi
  echo "installing into $ROOT/.venv (once; some minutes)"
  rm -f "$ROOT"/.venv/.installed-*
  "$PYTHON" -m pip install --quiet --editable "$ROOT${extra:+[$extra]}" --constraint "$ROOT/constraints.txt" ||
    fail "$ROOT/.venv: installing failed. Mend what pip says above, then run the same command again." 69
  echo "$wanted" >"$ROOT/.venv/.installed-$extra"
}
