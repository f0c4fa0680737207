#!/usr/bin/env bash
# Builds one mpirun command line for tb-mpi, prints it and execs it; for Open MPI and for MPICH.
#
#   launch/mpirun.sh N CONFIG [options of tb-mpi]
#
# Environment: TB_MPI = the binary (else the release build), MPIRUN = the launcher (else the one of the
# MPI that the binary is linked with), MPIRUN_OPTIONS = more options of the launcher, such as --hostfile hosts.
set -euo pipefail

fail() { echo "launch/mpirun.sh: $*" >&2; exit 2; }

case ${1:-} in
  '' | *[!0-9]* | 0*) echo "usage: launch/mpirun.sh N CONFIG [options of tb-mpi]" >&2; exit 2 ;;
esac
[ $# -ge 2 ] || fail "no config file given, such as configs/quickstart.toml"
ranks=$1
shift

root=$(realpath --relative-to=. "$(dirname "$0")/..")
[ "$root" = . ] && root= || root=$root/
binary=${TB_MPI:-${CARGO_TARGET_DIR:-${root}target}/release/tb-mpi}
[ -x "$binary" ] || fail "$binary is not there: cargo build --release"

# A launcher of another MPI starts N jobs of one rank each and exits with 0, so the two must match.
case $(ldd "$binary" 2>/dev/null) in
  *libmpi.so.40* | *libopen-rte*) linked=openmpi ;;
  *libmpich.so* | *libmpi.so.12*) linked=mpich ;;
  *) linked=unknown ;;
esac
launcher=${MPIRUN:-mpirun}
[ -z "${MPIRUN:-}" ] && command -v "mpirun.$linked" >/dev/null && launcher=mpirun.$linked
command -v "$launcher" >/dev/null || fail "$launcher is not there: ci/install installs an MPI"
case $("$launcher" --version 2>&1) in
  *"Open MPI"* | *OpenRTE* | *PRRTE*) dialect=openmpi ;;
  *) dialect=mpich ;;
esac
[ $linked = unknown ] || [ $linked = $dialect ] ||
  fail "$binary is linked with $linked but $launcher belongs to $dialect: set MPIRUN to the launcher of $linked"

environment=()
command=("$launcher")
if [ $dialect = openmpi ]; then
  if [ "$(id -u)" = 0 ]; then
    environment+=(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
  fi
  # tb-mpi places its threads itself; bound to one core, all threads of a rank would share it.
  command+=(--bind-to none)
  # Outside a batch job Open MPI counts the cores of this host, and refuses more ranks than that.
  cores=$(lscpu -p=core,socket 2>/dev/null | grep -v '^#' | sort -u | wc -l)
  usable=$(nproc)
  [ "$cores" -gt 0 ] && [ "$cores" -lt "$usable" ] && usable=$cores
  if [ "$ranks" -gt "$usable" ] && [ -z "${SLURM_JOB_ID:-}${PBS_JOBID:-}${LSB_JOBID:-}${MPIRUN_OPTIONS:-}" ]; then
    command+=(--oversubscribe)
  fi
fi
# shellcheck disable=SC2206 # several options in one variable
command+=(${MPIRUN_OPTIONS:-} -np "$ranks" "$binary" "$@")

{ printf '+'; printf ' %q' "${environment[@]}" "${command[@]}"; echo; } >&2
exec env "${environment[@]}" "${command[@]}"
