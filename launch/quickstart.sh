#!/usr/bin/env bash
# From a fresh machine to the first figures: installs what is missing, builds, and runs pull and push
# between two ranks, each with rotated and with fixed sources. Options are passed on to tb-mpi.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH

ci/install
echo "building (the first time takes a while)" >&2
cargo build --release --quiet
exec launch/mpirun.sh 2 configs/quickstart.toml --json quickstart.json "$@"
