#!/usr/bin/env bash
# A smoke test of one GPU: what only a device can show, in less than 8 minutes, without a network, with the torch that is there.
#
#     benchmarks/gpu.sh                  all checks, a line each; exits with 1 if one fails
#     benchmarks/gpu.sh --only bits kill  some of them
#     benchmarks/gpu.sh --device cpu     what a CPU can show of them: whether the checks themselves work
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
