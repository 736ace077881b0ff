#!/usr/bin/env bash
# Builds the native module with the address and undefined-behaviour sanitizers and runs the tests of the ops with it.
# Usage: tools/sanitize.sh [arguments for pytest]        PYTHON names the interpreter of the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
cxx=${CXX:-c++}
cmake=$(command -v cmake || echo "$(dirname "$python")/cmake")
[ -x "$cmake" ] || { echo "octavo: make sanitize needs cmake (apt install cmake)" >&2; exit 1; }

"$cmake" -S . -B build/sanitize -DOCTAVO_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER="$cxx" \
    -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >/dev/null
"$cmake" --build build/sanitize --parallel "$(nproc)"
module=$(ls -t build/sanitize/_native*.so | head -n 1)

# The interpreter itself is not instrumented: the runtime must come first, and CPython's own arenas are no leaks of ours.
export LD_PRELOAD="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONMALLOC=malloc OCTAVO_SANITIZED=$PWD/$module PYTHONPATH=tools
if [ $# -eq 0 ]; then set -- tests/ops -m "not slow"; fi
exec "$python" -m pytest -q -p sanitized_native "$@"
