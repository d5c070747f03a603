#!/usr/bin/env bash
# Install the Debian packages that some tests need (they say so when skipped): Fashion-MNIST, Slurm, Chromium, hosts of their own, a process 1. Needs root and apt.
set -euo pipefail
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends dataset-fashion-mnist chromium chromium-driver \
    iproute2 iptables bindfs tini
"$(dirname "$0")/../slurm/local_cluster.sh" install
