/* The explicit interface of connections through memory windows (docs/ntsocks.md).
 *
 * Link with libbeeline_sockets_preload, or run the program under `beeline run`: the library then answers socket, bind,
 * listen, accept, connect, read, write, shutdown, close, poll, epoll and the rest as it does for programs that do not
 * know of it. The names nts_socket and so on are those calls. Beside them a program may fill and read the lane's blocks
 * where they lie: between programs and window nothing is copied then. Bytes of both kinds of calls are one stream.
 *
 * Every call returns -1 with errno for an error; EOPNOTSUPP: the connection is the kernel's (no window leads there, or
 * the other program has no library), so use send and recv.
 */
#ifndef BEELINE_NTS_H
#define BEELINE_NTS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A block of the connection's memory. */
typedef struct nts_block {
    void *bytes;     /* where its payload lies */
    size_t length;   /* most bytes it takes, or the bytes that came */
    uint32_t number; /* the library's */
} nts_block;

/* A free block, to be filled and sent. 1: it is in *room; 0: none now, poll for POLLOUT. A block that is not sent stays
 * the program's until the connection closes. EPIPE, ECONNRESET. */
int nts_room(int fd, nts_block *room);

/* Sends the first `length` bytes of a block from nts_room; it is not the program's any more. EMSGSIZE for none or more
 * than fit. */
int nts_send_room(int fd, const nts_block *room, size_t length);

/* Direct mode. Asks for `bytes` of the other host's memory, which this program then writes itself: no proxy copies what
 * goes by it. Once a connection. ENOBUFS: the quota is used up; EEXIST. */
int nts_extent(int fd, size_t bytes);

/* A part of that memory, to be filled and sent, one at a time. 1: it is in *room; 0: none until the other program has
 * released more. EMSGSIZE for more than there is, EBUSY while another part is given, ENXIO without an extent. */
int nts_extent_room(int fd, size_t length, nts_block *room);

/* Sends the first `length` bytes of the part that was given. The other program gets them as any packet: nts_arrived where
 * they lie, or recv. EAGAIN: poll for POLLOUT and try again. */
int nts_extent_send(int fd, size_t length);

/* The packet at the head, where it lies. 1: it is in *packet; 0: none now, poll for POLLIN; ENODATA: the stream ended,
 * or this end is shut for reading; ECONNRESET. The same packet again until it is released. */
int nts_arrived(int fd, nts_block *packet);

/* As nts_arrived, for a program that waits for this connection alone: waits as recv does, first looking at the queue,
 * so that a packet that comes soon costs no system call at either end. 1; EAGAIN where fd does not wait or its
 * SO_RCVTIMEO is over; EINTR; and as nts_arrived. */
int nts_wait(int fd, nts_block *packet);

/* Gives the packet at the head back; its bytes are not the program's any more. */
int nts_release(int fd, const nts_block *packet);

/* The connection that fd makes next has this priority, 0 (first) to 7; before connect. */
int nts_conn_set_prior(int fd, int priority);

/* 1: the connection goes through the window; 0: it is the kernel's. */
int nts_is_packets(int fd);

/* Bytes that the library copied between the program's buffers and blocks, both ways. */
long long nts_copied(int fd);

#define nts_socket socket
#define nts_bind bind
#define nts_listen listen
#define nts_accept accept
#define nts_accept4 accept4
#define nts_connect connect
#define nts_shutdown shutdown
#define nts_close close
#define nts_read read
#define nts_readv readv
#define nts_write write
#define nts_writev writev
#define nts_send send
#define nts_sendto sendto
#define nts_sendmsg sendmsg
#define nts_recv recv
#define nts_recvfrom recvfrom
#define nts_recvmsg recvmsg
#define nts_setsockopt setsockopt
#define nts_getsockopt getsockopt
#define nts_getpeername getpeername
#define nts_getsockname getsockname
#define nts_fcntl fcntl
#define nts_ioctl ioctl
#define nts_select select
#define nts_poll poll
#define nts_epoll_create epoll_create
#define nts_epoll_ctl epoll_ctl
#define nts_epoll_wait epoll_wait

#ifdef __cplusplus
}
#endif

#endif
