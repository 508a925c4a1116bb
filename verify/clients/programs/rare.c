// Rare ways in which a program uses a connection: "children", children that no handler hears of; "deferred" and
// "asynchronous", threads that are cancelled in a call; "signals", O_ASYNC on a connection that has long lived.
//
// Each says what became of the bytes, as it is without the library.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

pid_t _Fork(void);

static int one, other;

static void must(int truth, const char *what) {
    if (!truth) {
        printf("%s: %s\n", what, strerror(errno));
        fflush(stdout);
        _exit(1);
    }
}

static void send_word(int fd, const char *word) {
    must(send(fd, word, 4, MSG_NOSIGNAL) == 4, "send");
}

static void want(int fd, const char *word) {
    char got[5] = {0};
    must(recv(fd, got, 4, MSG_WAITALL) == 4, "recv");
    if (memcmp(got, word, 4) != 0) {
        printf("%s instead of %s\n", got, word);
        fflush(stdout);
        _exit(1);
    }
}

static void connect_both(void) {
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    must(bind(listener, (struct sockaddr *)&at, sizeof at) == 0, "bind");
    must(listen(listener, 4) == 0, "listen");
    must(getsockname(listener, (struct sockaddr *)&at, &length) == 0, "getsockname");
    one = socket(AF_INET, SOCK_STREAM, 0);
    must(connect(one, (struct sockaddr *)&at, sizeof at) == 0, "connect");
    other = accept(listener, NULL, NULL);
    must(other >= 0, "accept");
    for (int turn = 0; turn < 50; turn++) {
        send_word(one, "ping");
        want(other, "ping");
        send_word(other, "pong");
        want(one, "pong");
    }
}

// ---- children ----

static int child_of_clone(void *unused) {
    (void)unused;
    send_word(one, "clon");
    want(one, "back");
    _exit(0);
}

static void a_child(int how) {
    static char stack[1 << 16] __attribute__((aligned(16)));
    pid_t child = -1;
    switch (how) {
    case 0: child = _Fork(); break;
    case 1: child = syscall(SYS_fork); break;
    case 2: child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); break;
    default: child = clone(child_of_clone, stack + sizeof stack, SIGCHLD, NULL); break;
    }
    must(child >= 0, "a child");
    if (child == 0) {
        send_word(one, "clon");
        want(one, "back");
        _exit(0);
    }
    want(other, "clon");
    send_word(other, "back");
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the child's end");
    send_word(one, "mine");
    want(other, "mine");
}

// ---- threads that are cancelled ----

static int is_asynchronous;
static volatile int is_inside;

static void *receives(void *unused) {
    int before;
    (void)unused;
    pthread_setcanceltype(is_asynchronous ? PTHREAD_CANCEL_ASYNCHRONOUS : PTHREAD_CANCEL_DEFERRED, &before);
    for (;;) {
        char byte;
        is_inside = 1;
        // Nothing comes but what wakes it; the busy one looks all the time.
        if (recv(other, &byte, 1, is_asynchronous ? MSG_DONTWAIT : 0) == 0) return NULL;
        pthread_testcancel();
    }
}

static void a_thread(void) {
    pthread_t thread;
    void *ended;
    is_inside = 0;
    must(pthread_create(&thread, NULL, receives, NULL) == 0, "a thread");
    while (!is_inside) sched_yield();
    usleep(is_asynchronous ? rand() % 300 : 2000);
    must(pthread_cancel(thread) == 0, "pthread_cancel");
    if (!is_asynchronous) {
        // Without the library it is gone by now, or goes before it reads: what it takes here is this byte at most.
        must(send(one, "w", 1, MSG_NOSIGNAL) == 1, "the byte that wakes");
    }
    must(pthread_join(thread, &ended) == 0 && ended == PTHREAD_CANCELED, "pthread_join");
    char byte;
    while (recv(other, &byte, 1, MSG_DONTWAIT) == 1) must(byte == 'w', "the byte that woke");
    send_word(one, "next");
    want(other, "next");
}

// ---- signals ----

static volatile sig_atomic_t signals;

static void count(int number) {
    (void)number;
    signals++;
}

static void asks_for_signals(void) {
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    must(sigaction(SIGIO, &action, NULL) == 0, "sigaction");
    must(fcntl(other, F_SETOWN, getpid()) == 0, "F_SETOWN");
    must(fcntl(other, F_SETFL, O_ASYNC) == 0, "F_SETFL");
    must(fcntl(other, F_GETFL) & O_ASYNC, "F_GETFL");
    for (int turn = 0; turn < 100; turn++) {
        send_word(one, "sign");
        want(other, "sign");
    }
    must(fcntl(other, F_SETFL, 0) == 0, "F_SETFL");
}

int main(int count, char **words) {
    const char *mode = count > 1 ? words[1] : "";
    connect_both();
    if (strcmp(mode, "children") == 0) {
        for (int turn = 0; turn < 40; turn++) a_child(turn % 4);
    } else if (strcmp(mode, "signals") == 0) {
        asks_for_signals();
    } else {
        is_asynchronous = strcmp(mode, "asynchronous") == 0;
        for (int turn = 0; turn < 40; turn++) a_thread();
    }
    printf("%s: whole\n", mode);
    return 0;
}
