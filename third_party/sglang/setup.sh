#!/usr/bin/env bash
# Builds .venv-sglang, the servers' own environment; does nothing where it is complete.
#
#     third_party/sglang/setup.sh cpu [python3.11]     a server without a GPU, for tests: exact versions, 2.5 GB
#     third_party/sglang/setup.sh gpu [python3.11]     a server on NVIDIA GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

kind="${1:-cpu}" python="${2:-python3.11}" venv=.venv-sglang
case "$kind" in
  cpu) requirements=requirements-sglang.txt; options=(--no-deps) ;;
  gpu) requirements=requirements-sglang-gpu.txt; options=() ;;
  *) echo "setup.sh: $kind is unknown; say cpu or gpu" >&2; exit 2 ;;
esac
done_file="$venv/installed-$requirements"
if [ -f "$done_file" ] && [ "$done_file" -nt "$requirements" ]; then
  exit 0
fi
command -v "$python" >/dev/null || { echo "setup.sh: $python was not found; SGLang needs Python 3.11 here" >&2; exit 1; }
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install "${options[@]}" -r "$requirements"
# Written last: an installation that was cut short leaves no such file.
"$venv/bin/python" -m pip --disable-pip-version-check freeze > "$done_file"
