#!/usr/bin/env bash
# Installs the Debian packages that some tests need, if it runs as root and apt-get exists. Prints one
# line with the packages that are still missing. Tests that need a missing package are skipped.
set -euo pipefail

# A package is installed if this command of the package exists.
declare -A package=([chromium]=chromium [sshd]=openssh-server [ssh]=openssh-client [ip]=iproute2
    [iptables]=iptables [slurmctld]=slurm-wlm [munged]=munge)

missing() {
    local command
    for command in "${!package[@]}"; do
        PATH="$PATH:/usr/sbin" command -v "$command" >/dev/null || echo "${package[$command]}"
    done | sort | paste -sd ' '
}

lacking=$(missing)
[ -n "$lacking" ] || exit 0
why="only root can install them"
if ! command -v apt-get >/dev/null; then
    why="this machine has no apt-get"
elif [ "$(id -u)" = 0 ]; then
    echo "installing Debian packages for the tests: $lacking"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    apt-get update >"$log" 2>&1 || true
    for name in $lacking; do # one by one, so that a package that fails does not stop the others
        DEBIAN_FRONTEND=noninteractive \
            apt-get install -y --no-install-recommends "$name" >>"$log" 2>&1 || true
    done
    why="apt-get: $(grep -E '^E: ' "$log" || tail -n 1 "$log")"
fi
lacking=$(missing)
[ -z "$lacking" ] || echo "left out: tests that need the Debian packages $lacking ($why)"
