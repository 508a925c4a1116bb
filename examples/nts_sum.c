/* Numbers through a memory window without a copy by programs or library: the client writes them where they are sent
 * from, the server adds them up where they came to.
 *
 *   cc -I systems/sockets-preload/include examples/nts_sum.c -L DIR -lbeeline_sockets_preload -o nts_sum
 *   nts_sum serve ADDRESS PORT            nts_sum send ADDRESS PORT COUNT
 *   nts_sum direct ADDRESS PORT COUNT     the client writes the other host's memory itself: no proxy copies either
 */
#include <arpa/inet.h>
#include <errno.h>
#include <nts.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(int outcome, const char *what)
{
    if (outcome < 0) {
        perror(what);
        exit(1);
    }
}

static void wait_for(int fd, short what)
{
    struct pollfd one = {.fd = fd, .events = what};
    check(nts_poll(&one, 1, -1), "poll");
}

/* The next packet, or 0 at the end of the stream. A program with more than one descriptor to look at. */
static int next(int fd, nts_block *packet)
{
    for (;;) {
        int came = nts_arrived(fd, packet);
        if (came < 0 && errno == ENODATA)
            return 0;
        check(came, "nts_arrived");
        if (came)
            return 1;
        wait_for(fd, POLLIN);
    }
}

/* The same for a program that waits for this connection alone. */
static int wait_next(int fd, nts_block *packet)
{
    int came = nts_wait(fd, packet);
    if (came < 0 && errno == ENODATA)
        return 0;
    check(came, "nts_wait");
    return 1;
}

static void room(int fd, nts_block *block)
{
    for (;;) {
        int there = nts_room(fd, block);
        check(there, "nts_room");
        if (there)
            return;
        wait_for(fd, POLLOUT);
    }
}

static void serve(struct sockaddr_in *at)
{
    int listener = nts_socket(AF_INET, SOCK_STREAM, 0), on = 1;
    nts_setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    check(nts_bind(listener, (struct sockaddr *)at, sizeof *at), "bind");
    check(nts_listen(listener, 8), "listen");
    int fd = nts_accept(listener, NULL, NULL);
    check(fd, "accept");
    uint64_t sum = 0;
    nts_block block;
    while (wait_next(fd, &block)) {
        /* The client sends whole numbers in each packet. */
        const uint64_t *numbers = block.bytes;
        for (size_t index = 0; index < block.length / sizeof *numbers; index++)
            sum += numbers[index];
        check(nts_release(fd, &block), "nts_release");
    }
    room(fd, &block);
    memcpy(block.bytes, &sum, sizeof sum);
    check(nts_send_room(fd, &block, sizeof sum), "nts_send_room");
    printf("copied %lld\n", nts_copied(fd));
    check(nts_close(fd), "close");
}

/* A part of the other host's memory. */
static void part(int fd, size_t length, nts_block *block)
{
    for (;;) {
        int there = nts_extent_room(fd, length, block);
        check(there, "nts_extent_room");
        if (there)
            return;
        usleep(100);
    }
}

static void send_numbers(struct sockaddr_in *to, uint64_t count, size_t extent)
{
    int fd = nts_socket(AF_INET, SOCK_STREAM, 0);
    check(nts_conn_set_prior(fd, 1), "nts_conn_set_prior");
    check(nts_connect(fd, (struct sockaddr *)to, sizeof *to), "connect");
    if (nts_is_packets(fd) != 1) {
        fprintf(stderr, "the connection is the kernel's\n");
        exit(3);
    }
    if (extent)
        check(nts_extent(fd, extent), "nts_extent");
    nts_block block;
    for (uint64_t number = 0; number < count;) {
        if (extent)
            part(fd, extent / 8, &block);
        else
            room(fd, &block);
        uint64_t *numbers = block.bytes;
        size_t length = 0;
        for (; length < block.length / sizeof *numbers && number < count; length++)
            numbers[length] = number++;
        if (!extent)
            check(nts_send_room(fd, &block, length * sizeof *numbers), "nts_send_room");
        else
            while (nts_extent_send(fd, length * sizeof *numbers) < 0) {
                check(errno == EAGAIN ? 0 : -1, "nts_extent_send");
                wait_for(fd, POLLOUT);
            }
    }
    check(nts_shutdown(fd, SHUT_WR), "shutdown");
    if (!next(fd, &block)) {
        fprintf(stderr, "no answer\n");
        exit(1);
    }
    uint64_t sum;
    memcpy(&sum, block.bytes, sizeof sum);
    check(nts_release(fd, &block), "nts_release");
    printf("sum %llu, copied %lld\n", (unsigned long long)sum, nts_copied(fd));
    check(nts_close(fd), "close");
}

int main(int count, char **words)
{
    if (count < 4) {
        fprintf(stderr, "nts_sum serve ADDRESS PORT | nts_sum send|direct ADDRESS PORT COUNT\n");
        return 2;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[3]))};
    if (inet_pton(AF_INET, words[2], &address.sin_addr) != 1)
        return 2;
    if (strcmp(words[1], "serve") == 0)
        serve(&address);
    else
        send_numbers(&address, count > 4 ? strtoull(words[4], NULL, 10) : 1000000,
                     strcmp(words[1], "direct") == 0 ? 1 << 20 : 0);
    return 0;
}
