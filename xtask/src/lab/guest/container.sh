#!/bin/sh
# Containers of a guest, whose programs move to another guest: container.sh COMMAND ...
#
# A container is a network namespace with an address and a card of its own, on a bridge with the
# guest's wire. Images of a program lie in /run/images. CRIU is started inside the container's
# namespace, so that the namespace itself is none of its business.
set -e
inside() { name=$1; shift; nsenter --net="/run/netns/$name" "$@"; }

# Fails with what CRIU complained of.
criu_in() {
    name=$1 action=$2; shift 2
    # Errors of what it tries the kernel for come first, and are no errors.
    inside "$name" criu "$action" -v4 -o "$action.log" -D /run/images --tcp-established \
        "$@" >/run/criu 2>&1 || {
        grep -E 'Error|Warn' "/run/images/$action.log" | tail -n 12 >&2
        exit 1
    }
}

command=$1; shift
case $command in
wire) # the guest's own card becomes a port of the bridge
    modprobe -a veth bridge nf_tables inet_diag tcp_diag udp_diag unix_diag netlink_diag \
        af_packet_diag sch_ingress cls_matchall act_gact
    ip link add br0 type bridge
    ip link set eth0 master br0
    ip addr flush dev eth0
    ip addr add "$LAB_SELF/24" dev br0
    ip link set br0 up
    ;;
make) # NAME ADDRESS NUMBER: on no wire yet; its card's address ends in NUMBER
    ip netns add "$1"
    ip -n "$1" link set lo up
    ip link add "on-$1" type veth peer name e0 netns "$1"
    ip -n "$1" link set e0 address "02:00:00:00:00:$3"
    ip -n "$1" addr add "$2/24" dev e0
    ip -n "$1" link set e0 up
    ip link set "on-$1" up
    ;;
attach) ip link set "on-$1" master br0 ;;
detach) ip link set "on-$1" nomaster ;;
remove) # NAME: with everything that still runs in it
    inside "$1" sh -c 'for p in $(ip netns pids "$0"); do [ $p = $$ ] || kill -9 $p; done' "$1" || true
    ip link del "on-$1"
    ip netns del "$1"
    ;;
move-in) # NAME ADDRESS: a second address; nobody is answered on it before `open`
    inside "$1" tc qdisc add dev lo clsact
    inside "$1" tc filter add dev lo ingress matchall action drop
    ip -n "$1" addr add "$2/24" dev e0
    ;;
open) inside "$1" tc qdisc del dev lo clsact ;;
move-out) # NAME ADDRESS: and with it what CRIU's lock left
    ip -n "$1" addr del "$2/24" dev e0
    inside "$1" nft flush ruleset
    ;;
monitor) # NAME OWN OTHER: and a relay, for connections with the container whose address is OTHER
    printf 'listen = "tcp://%s:4791"\nsleepers_hold_seconds = 0\n[[hosts]]\naddresses = ["%s"]\nrelay = "tcp://%s:4791"\n' \
        "$2" "$3" "$3" >"/run/hosts-$1.toml"
    inside "$1" target/debug/beeline sockets monitor --background --hosts "/run/hosts-$1.toml"
    ;;
run) inside "$@" ;;
serve) # NAME PID COMMAND...: as the leader of a session, with nothing open, with this number
    name=$1 process=$2; shift 2
    # Whatever else begins at that moment may take the number.
    for turn in 1 2 3 4 5 6 7 8 9 10; do
        echo $((process - 1)) >/proc/sys/kernel/ns_last_pid
        nsenter --net="/run/netns/$name" setsid "$@" </dev/null >/dev/null 2>&1 &
        [ $! != "$process" ] || exit 0
        kill -9 $! && wait $! || true
        sleep 0.2
    done
    echo "process $! instead of $process" >&2
    exit 1
    ;;
dump) # NAME PID
    rm -rf /run/images
    mkdir /run/images
    criu_in "$1" dump --network-lock nftables --tree "$2"
    du -sk /run/images | cut -f 1
    ;;
restore) # NAME attach|open: the network is let in when the sockets are there
    cat >/run/then <<END
#!/bin/sh
[ "\$CRTOOLS_SCRIPT_ACTION" != post-restore ] || nsenter --net=/proc/1/ns/net sh '$(realpath "$0")' $2 $1
END
    chmod +x /run/then
    criu_in "$1" restore --restore-detached --action-script /run/then
    ;;
take) # images come from the other guest
    rm -rf /run/images
    mkdir /run/images
    python3 -c 'import shutil, socket, sys
heard = socket.create_server(("", 7000)).accept()[0].makefile("rb")
shutil.copyfileobj(heard, sys.stdout.buffer)' | tar -x -C /run/images
    ;;
give) # images go to the other guest, which may not listen yet
    tar -c -C /run/images . | python3 -c 'import os, shutil, socket, sys, time
for turn in range(100):
    try:
        peer = socket.create_connection((os.environ["LAB_PEER"], 7000))
        break
    except OSError:
        time.sleep(0.1)
shutil.copyfileobj(sys.stdin.buffer, peer.makefile("wb"))'
    ;;
*) echo "container.sh: $command?" >&2; exit 2 ;;
esac
