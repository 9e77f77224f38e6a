#!/usr/bin/env bash
# Run a command as on a slow machine: it and its children share PERCENT % of one core (default 100).
#
#     tests/rig/slow.sh [PERCENT] COMMAND...
#
# Uses the first of these that works: the CPU controller of cgroup v2 or v1 (root), systemd-run (in a
# user's session), taskset (always one whole core, whatever PERCENT is).
set -u
percent=100
case "${1:-}" in
  ''|*[!0-9]*) ;;
  *) percent=$1; shift ;;
esac
[ $# -gt 0 ] || { echo "usage: $0 [PERCENT] COMMAND..." >&2; exit 2; }

in_group() {
  # $1: the folder of a cgroup with a CPU limit; the rest: the command
  local group=$1 code=0; shift
  bash -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$group" "$@" || code=$?
  for _ in $(seq 50); do rmdir "$group" 2>/dev/null && break; sleep 0.1; done
  exit "$code"
}

limit_v2() {
  local parent=/sys/fs/cgroup
  grep -qsw cpu "$parent/cgroup.controllers" || return 1
  grep -qsw cpu "$parent/cgroup.subtree_control" ||
    echo +cpu 2>/dev/null > "$parent/cgroup.subtree_control" || return 1
  mkdir "$parent/$1" 2>/dev/null && echo "$((percent * 1000)) 100000" > "$parent/$1/cpu.max" &&
    group=$parent/$1
}

limit_v1() {
  local parent=/sys/fs/cgroup/cpu
  [ -e "$parent/cpu.cfs_quota_us" ] && mkdir "$parent/$1" 2>/dev/null &&
    echo 100000 > "$parent/$1/cpu.cfs_period_us" &&
    echo "$((percent * 1000))" > "$parent/$1/cpu.cfs_quota_us" && group=$parent/$1
}

group=
if limit_v2 "taas-slow-$$" || limit_v1 "taas-slow-$$"; then
  echo "slow: $percent % of one core, by $group" >&2
  in_group "$group" "$@"
elif systemd-run --user --scope --quiet -p CPUQuota="$percent%" true 2>/dev/null; then
  echo "slow: $percent % of one core, by systemd-run" >&2
  exec systemd-run --user --scope --quiet -p CPUQuota="$percent%" "$@"
elif command -v taskset > /dev/null; then
  echo "slow: one core, by taskset" >&2
  exec taskset --cpu-list "$(taskset --cpu-list --pid $$ | sed 's/.*: //; s/[-,].*//')" "$@"
fi
echo "slow: nothing here limits the processor: no cgroup, systemd-run or taskset" >&2
exit 3
