#!/usr/bin/env bash
# Simulates hosts, each with a real sshd, on one Linux machine; needs root. hosts.py uses it.
#
#   hosts.sh up N            starts hosts 1..N
#   hosts.sh down            ends all hosts and removes their files and network
#   hosts.sh exec I CMD...   runs a command in host I, without ssh
#   hosts.sh cut I | heal I          pulls the network cable, and plugs it in again
#   hosts.sh hole I | unhole I       drops all packets while the link stays up
#   hosts.sh limit I RATE | none     limits the bandwidth in both directions, such as 1mbit
#   hosts.sh lose I PERCENT | none   drops a part of the packets to the host
#   hosts.sh deaf I | none           drops all packets to the host, none from the host
#   hosts.sh kill I          powers the host off
#
# Each host has its own network, mounts, process list, host name and IPC. Its address is $SUBNET.I on
# eth0; the caller's address is $SUBNET.254. A host sees empty folders in place of the folders of HIDE.
# In these, it sees the folders of KEEP read-only and the folders of SHARE writable.
set -euo pipefail

PREFIX=${TAAS_HOSTS_PREFIX:?}
SUBNET=${TAAS_HOSTS_SUBNET:?}
STATE=${TAAS_HOSTS_STATE:?}
HIDE="${TAAS_HOSTS_HIDE:-} /tmp /var/tmp /root /home /srv /dev/shm /mnt /run"
KEEP=${TAAS_HOSTS_KEEP:-}
SHARE=${TAAS_HOSTS_SHARE:-}
BRIDGE=${PREFIX}br
SELF=$(readlink -f "$0")

die() { echo "hosts.sh: $*" >&2; exit 1; }
pid1() { cat "$STATE/$1/pid" 2>/dev/null || true; }
alive() { local p; p=$(pid1 "$1"); [[ -n $p && -d /proc/$p ]]; }
inside() {
    local i=$1; shift
    alive "$i" || die "host $i is not up"
    nsenter -t "$(pid1 "$i")" -m -u -i -n -p -- "$@"
}

bind() { # from, to, options
    mkdir -p "$2"; mount --bind "$1" "$2"
    [[ -z $3 ]] || mount -o "remount,bind,$3" "$2"
}

# Pid 1 of a host: sets up the host's mounts, starts sshd, and stays until it is killed.
host_init() {
    local i=$1 stage p q last=
    hostname "$PREFIX$i"
    stage=$STATE/$i/stage; mkdir -p "$stage"; mount -t tmpfs tmpfs "$stage"
    for p in $HIDE; do
        [[ -d $p && ! -L $p ]] || continue
        mkdir -p "$stage$p"; mount -t tmpfs -o "mode=$(stat -c %a "$p")" tmpfs "$stage$p"
        for q in $KEEP; do [[ $q == "$p"/* && -e $q ]] && bind "$q" "$stage$q" ro; done
        for q in $SHARE; do [[ $q == "$p"/* && -e $q ]] && bind "$q" "$stage$q" ""; done
    done
    mkdir -p "$stage/run/sshd" "$stage/run/rig"
    cp "$STATE/$i/"{sshd_config,hosts} "$STATE/host_key" "$STATE/authorized_keys" "$stage/run/rig/"
    chmod 600 "$stage/run/rig/host_key"
    [[ -d $stage/root ]] && chmod go+x "$stage/root"
    mount --bind "$stage/run/rig/hosts" /etc/hosts
    for p in $HIDE; do # last the folder with STATE, because the stage is in it
        [[ -d $stage$p ]] || continue
        if [[ $STATE/ == "$p"/* ]]; then last=$p; else mount --rbind "$stage$p" "$p"; fi
    done
    [[ -n $last ]] && mount --rbind "$stage$last" "$last"
    cd /
    /usr/sbin/sshd -D -e -f /run/rig/sshd_config &
    while :; do wait || true; sleep 1; done # also reaps orphans
}

up_one() {
    local i=$1 name=$PREFIX$1 veth=${PREFIX}v$1 dir=$STATE/$1 unshare end kid
    mkdir -p "$dir"
    ip netns add "$name"
    ip link add "$veth" type veth peer name eth0 netns "$name"
    ip link set "$veth" master "$BRIDGE" up
    ip -n "$name" link set lo up
    ip -n "$name" addr add "$SUBNET.$i/24" dev eth0
    ip -n "$name" link set eth0 up
    cat > "$dir/sshd_config" <<CFG
Port 22
ListenAddress $SUBNET.$i
HostKey /run/rig/host_key
AuthorizedKeysFile /run/rig/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
CFG
    cp "$STATE/hosts" "$dir/hosts"
    # As on Debian. gloo then listens on an address that other hosts cannot reach.
    [[ ${TAAS_HOSTS_DEBIAN:-0} == 1 ]] && sed -i "s/^$SUBNET\.$i $name\$/127.0.1.1 $name/" "$dir/hosts"
    setsid ip netns exec "$name" \
        unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc --propagation private \
        "$SELF" __init "$i" >"$dir/sshd.log" 2>&1 </dev/null &
    unshare=$! end=$((SECONDS + 120))
    while [[ -d /proc/$unshare ]] && (( SECONDS < end )); do
        kid=$(awk '{print $1}' "/proc/$unshare/task/$unshare/children" 2>/dev/null || true)
        if [[ -n $kid ]]; then
            echo "$kid" > "$dir/pid"
            (exec 3<>"/dev/tcp/$SUBNET.$i/22") 2>/dev/null && return
        fi
        sleep 0.05
    done
    cat "$dir/sshd.log" >&2; die "the sshd of host $i did not answer"
}

down_one() {
    local i=$1 name=$PREFIX$1 p
    kill -9 "$(pid1 "$i")" 2>/dev/null || true # it may have ended
    for p in $(ip netns pids "$name" 2>/dev/null || true); do kill -9 "$p" 2>/dev/null || true; done
    for p in $(seq 100); do [[ -z $(ip netns pids "$name" 2>/dev/null) ]] && break; sleep 0.05; done
    ip link del "${PREFIX}v$i" 2>/dev/null || true
    ip netns del "$name" 2>/dev/null || true
    rm -rf "${STATE:?}/$i"
}

# The caller has created STATE, which reserves PREFIX and SUBNET.
up() {
    local count=$1 i key
    mkdir -p /run/sshd
    ssh-keygen -q -t ed25519 -N '' -C rig -f "$STATE/id_ed25519"
    ssh-keygen -q -t ed25519 -N '' -f "$STATE/host_key"
    cp "$STATE/id_ed25519.pub" "$STATE/authorized_keys"
    key=$(cut -d' ' -f1,2 "$STATE/host_key.pub")
    { echo "127.0.0.1 localhost"; for i in $(seq 64); do echo "$SUBNET.$i $PREFIX$i"; done; } > "$STATE/hosts"
    for i in $(seq 64); do echo "$SUBNET.$i,$PREFIX$i $key"; done > "$STATE/known_hosts"
    {
        for i in $(seq 64); do printf 'Host %s\n  HostName %s\n' "$PREFIX$i" "$SUBNET.$i"; done
        printf 'Host *\n  User root\n  IdentityFile %s\n  IdentitiesOnly yes\n  UserKnownHostsFile %s\n' \
            "$STATE/id_ed25519" "$STATE/known_hosts"
    } > "$STATE/ssh_config"
    ip link add "$BRIDGE" type bridge
    ip addr add "$SUBNET.254/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    for i in $(seq "$count"); do up_one "$i"; done
}

down() {
    local i
    for i in $(ls "$STATE" 2>/dev/null | grep -E '^[0-9]+$' || true); do down_one "$i"; done
    ip link del "$BRIDGE" 2>/dev/null || true
    rm -rf "$STATE"
}

limit() {
    local i=$1 rate=$2
    tc qdisc del dev "${PREFIX}v$i" root 2>/dev/null || true
    ip netns exec "$PREFIX$i" tc qdisc del dev eth0 root 2>/dev/null || true
    [[ $rate == none ]] && return
    tc qdisc replace dev "${PREFIX}v$i" root tbf rate "$rate" burst 256kb latency 50ms
    ip netns exec "$PREFIX$i" tc qdisc replace dev eth0 root tbf rate "$rate" burst 256kb latency 50ms
}

drop() { # host, iptables match for the packets to drop; none ends it
    local i=$1; shift
    ip netns exec "$PREFIX$i" iptables -w -F INPUT
    [[ $1 == none ]] || ip netns exec "$PREFIX$i" iptables -w -A INPUT "$@" -j DROP
}

cmd=$1; shift
case $cmd in
    __init) host_init "$@" ;;
    up) up "$@" ;;
    down) down ;;
    exec) inside "$@" ;;
    cut) ip link set "${PREFIX}v$1" down ;;
    heal) ip link set "${PREFIX}v$1" up ;;
    # Without a fixed neighbour entry, the kernel reports "no route to host" after three seconds.
    hole) ip link set "${PREFIX}v$1" nomaster
        ip neigh replace "$SUBNET.$1" lladdr 02:00:00:00:00:01 dev "$BRIDGE" nud permanent ;;
    unhole) ip neigh del "$SUBNET.$1" dev "$BRIDGE" || true # the kernel may have removed it
        ip link set "${PREFIX}v$1" master "$BRIDGE" ;;
    limit) limit "$@" ;;
    lose) if [[ $2 == none ]]; then drop "$1" none; else
        drop "$1" -i eth0 -m statistic --mode random --probability "$(awk "BEGIN{print $2/100}")"; fi ;;
    deaf) if [[ ${2:-} == none ]]; then drop "$1" none; else drop "$1" -i eth0; fi ;;
    kill) alive "$1" && kill -9 "$(pid1 "$1")" ;;
    *) die "no such command: $cmd" ;;
esac
