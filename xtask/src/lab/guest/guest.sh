#!/bin/sh
# Second stage: sets up the devices that were asked for, then runs what the host sends, one command
# a line, until it is powered off.
#
# control  in: NUMBER COMMAND     out: ready | trouble TEXT | exit NUMBER STATUS
# output, errors: what commands print; the byte 0x1e, "END NUMBER" and a newline end a command's
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/run/home TMPDIR=/run/scratch LANG=C.UTF-8
umask 022
. /run/settings
mkdir -p /run/home /run/scratch /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mkdir -p /lib/modules
mount --bind "$LAB_MODULES" /lib/modules
ulimit -n 65536

for port in /sys/class/virtio-ports/*; do
    case $(cat "$port/name") in
        control) control=/dev/${port##*/} ;;
        output) output=/dev/${port##*/} ;;
        errors) errors=/dev/${port##*/} ;;
    esac
done
exec 3<>"$control" 4<>"$output" 5<>"$errors"

trouble() { echo "trouble $1" >&3; }

ip link set lo up
if [ -n "$LAB_SELF" ]; then
    modprobe virtio_net && ip link set eth0 mtu 4200 up && ip addr add "$LAB_SELF/24" dev eth0 ||
        trouble "no network"
    export LAB_SELF LAB_PEER
fi
if [ -n "$LAB_RDMA" ]; then
    # Without the checksum module soft-RoCE of older kernels does not load.
    modprobe -q crc32_generic
    modprobe rdma_rxe && modprobe ib_uverbs && modprobe rdma_ucm &&
        rdma link add rxe0 type rxe netdev eth0 || trouble "no soft-RoCE device"
fi
if [ -n "$LAB_NVDIMM" ]; then
    modprobe nfit; modprobe nd_pmem; modprobe ext4
    # A file system made in an earlier boot is used again.
    waited=0
    while ! [ -e /sys/bus/nd/devices/namespace0.0 ] && [ $waited -lt 50 ]; do
        sleep 0.1; waited=$((waited + 1))
    done
    if ! [ -b /dev/pmem0 ] || [ "$(cat /sys/block/pmem0/queue/dax)" != 1 ]; then
        ndctl create-namespace -f -e namespace0.0 -m fsdax -M mem >/run/ndctl.log 2>&1 ||
            trouble "no fsdax namespace: $(tail -n 1 /run/ndctl.log)"
    fi
    mkdir -p /mnt/dax
    mount -t ext4 -o dax=always /dev/pmem0 /mnt/dax 2>/run/mount.log || {
        mkfs.ext4 -q -F -b 4096 /dev/pmem0 >/run/mkfs.log 2>&1 &&
            mount -t ext4 -o dax=always /dev/pmem0 /mnt/dax 2>/run/mount.log ||
            trouble "no DAX mount: $(tail -n 1 /run/mount.log)"
    }
    export LAB_DAX=/mnt/dax
fi
if [ -n "$LAB_DISK" ]; then
    modprobe virtio_blk; modprobe ext4
    mkdir -p /mnt/disk
    mount -t ext4 /dev/vda /mnt/disk 2>/run/mount.log || {
        mkfs.ext4 -q -F /dev/vda >/run/mkfs.log 2>&1 &&
            mount -t ext4 /dev/vda /mnt/disk 2>/run/mount.log ||
            trouble "no disk: $(tail -n 1 /run/mount.log)"
    }
fi
if [ -n "$LAB_IVSHMEM" ]; then
    for device in /sys/bus/pci/devices/*; do
        if [ "$(cat "$device/vendor" "$device/device" | tr '\n' ' ')" = "0x1af4 0x1110 " ]; then
            echo 1 >"$device/enable"
            export LAB_WINDOW="$device/resource2"
            if [ -n "$LAB_BELL" ]; then
                # Programs get its interrupts through vfio.
                modprobe vfio_iommu_type1; modprobe vfio-pci
                echo vfio-pci >"$device/driver_override"
                echo "${device##*/}" >/sys/bus/pci/drivers_probe
                [ "$(basename "$(readlink "$device/driver")")" = vfio-pci ] ||
                    trouble "vfio-pci does not take the ivshmem device"
            fi
        fi
    done
    [ -n "$LAB_WINDOW" ] || trouble "no ivshmem device"
fi
export LAB_GUEST

echo ready >&3
while IFS= read -r line <&3; do
    number=${line%% *}
    command=${line#* }
    (eval "$command") </dev/null >&4 2>&5 3>&- 4>&- 5>&-
    status=$?
    printf '\036END %s\n' "$number" >&4
    printf '\036END %s\n' "$number" >&5
    echo "exit $number $status" >&3
done
poweroff -f
