#!/bin/sh
# Servers that others wrote and their clients, one in each guest, under `beeline run`; started in the workspace.
#
# serve redis|nginx ADDRESS PORT  starts the server, ends once it listens
# stop                            asks it to end, ends once it is gone
# load ADDRESS PORT               redis-benchmark
# values ADDRESS PORT             redis-cli: what was set is what comes back
# fetch ADDRESS PORT              curl, the large file twice; says the hash of what it got
# hash                            of the file that nginx serves
set -e
beeline=$PWD/target/debug/beeline
what=$1 address=$3 port=$4
[ "$what" = serve ] || { address=$2 port=$3; }
mkdir -p /run/scratch/files
cd /run/scratch

run() { "$beeline" run -- "$@"; }
cli() { run redis-cli -h "$address" -p "$port" "$@"; }
listens() { ss -ltnH "sport = :$port" | grep -q .; }
wrong() { echo "$1" >&2; exit 1; }

serve() {
    case $1 in
        redis)
            set -- redis-server --bind "$address" --protected-mode no --port "$port" --save "" \
                --dir /run/scratch
            ;;
        nginx)
            temporary=
            for kind in client_body proxy fastcgi uwsgi scgi; do
                temporary="$temporary ${kind}_temp_path /run/scratch/$kind;"
            done
            head -c 4194304 /dev/urandom >files/large
            echo small >files/small
            cat >configuration <<END
user root; worker_processes 2; daemon off; pid /run/scratch/pid; error_log /run/scratch/errors;
events { worker_connections 64; }
http {
    access_log off; $temporary sendfile on; tcp_nopush on; keepalive_timeout 300;
    server { listen $address:$port; root /run/scratch/files; }
}
END
            set -- nginx -e /run/scratch/errors -c /run/scratch/configuration
            ;;
    esac
    listens && wrong "somebody else listens"
    # No function, whose process would be a shell's.
    "$beeline" run -- "$@" >/run/server 2>&1 &
    echo $! >/run/process
    for _ in $(seq 600); do
        listens && return
        sleep 0.1
    done
    wrong "$1 does not listen: $(cat /run/server)"
}

stop() {
    kill -TERM "$(cat /run/process)"
    for _ in $(seq 600); do
        kill -0 "$(cat /run/process)" 2>/dev/null || return 0
        sleep 0.1
    done
    wrong "it does not end: $(cat /run/server)"
}

load() {
    run redis-benchmark -h "$address" -p "$port" -t set,get -n 3000 -c 4 -P 8 -d 1000 -q >told
    tr '\r' '\n' <told | grep 'requests per second' >rates || wrong "$(cat told)"
    [ "$(wc -l <rates)" = 2 ] || wrong "$(cat told)"
    [ "$(cli STRLEN key:__rand_int__)" = 1000 ] || wrong "it left another value"
    sed 's/ per second.*/ per second/' rates | paste -s -d ';'
}

values() {
    awk 'BEGIN { for (key = 1; key <= 150; key++) {
        value = key; for (part = 1; part < key % 50; part++) value = value "-" key * part
        print "SET key:" key, value } }' >sets
    echo "SET large $(head -c 600000 /dev/urandom | base64 -w 0)" >>sets
    [ "$(cli <sets | grep -c '^OK$')" = 151 ] || wrong "not every SET was answered"
    # A child of the server has its connections, too, while it writes.
    cli BGSAVE | grep -q started || wrong "no BGSAVE"
    sed 's/SET \([^ ]*\) .*/GET \1/' sets | cli >got
    sed 's/SET [^ ]* //' sets | cmp - got
    echo "150 values and one of 800,000 bytes came back as they were set"
}

fetch() {
    # Small ones first, on the same connection, until both relays have it.
    run curl -sS --max-time 200 -o small "http://$address:$port/small?[1-100]" \
        -o one "http://$address:$port/large" -o two "http://$address:$port/large"
    [ "$(cat small)" = small ] || wrong "not what was asked for"
    cmp one two
    sha256sum <one
}

case $what in
    serve) serve "$2" ;;
    hash) sha256sum <files/large ;;
    *) "$what" ;;
esac
