#!/bin/busybox sh
# First stage, from the initial ramdisk: reach the host's file system and go on from there.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs dev /dev
$b mount -t tmpfs run /run
for module in $($b cat /modules/order); do
    $b insmod "/modules/$module" || echo "lab: insmod $module failed"
done
# Below: the host's files, read only. Above: a layer in memory that ends with the guest.
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=524288,cache=loose host /host ||
    echo "lab: the host's files are not there"
$b mount -t tmpfs layer /layer
$b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work whole /whole ||
    echo "lab: no root file system"
$b cp /guest.sh /settings /run/
for directory in proc sys dev run; do $b mount --move "/$directory" "/whole/$directory"; done
exec $b switch_root /whole /bin/sh /run/guest.sh
