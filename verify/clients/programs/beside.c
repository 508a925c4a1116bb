/* A server that hands its connections to another program, perhaps a static one:

   beside serve PORT HOW PROGRAM   echoes some lines, then HOW says who goes on;
   beside echo FD                  echoes what comes, and says "over" behind it;
   beside idle FD                  has FD and does nothing with it for a while;
   beside receive FD               echoes on the descriptor that comes in a message through FD;
   beside errors PROGRAM           what posix_spawn says of what is no program;
   beside young HOW PROGRAM        talks to itself over connections of which no byte went yet when
                                   PROGRAM is started with redirections (HOW: redirect), or with two
                                   of four connections as well (hand), and says what it has;
   beside answer                   echoes on standard input and on 9.

   HOW: spawn, spawnp, exec: as standard input and output; popen, system: by a shell that lacks the
   library; pass: in a message; leak-spawn, leak-exec: nobody, but PROGRAM idles with the connection. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void put(int fd, const char *bytes, size_t length)
{
    while (length > 0) {
        ssize_t sent = write(fd, bytes, length);
        if (sent <= 0)
            exit(3);
        bytes += sent;
        length -= sent;
    }
}

static void echo(int fd)
{
    char bytes[4096];
    ssize_t count;

    while ((count = read(fd, bytes, sizeof bytes)) > 0)
        put(fd, bytes, count);
    if (count == 0)
        put(fd, "over\n", 5);
}

/* Byte by byte, so that nothing of the next line is taken. */
static int echo_lines(int fd, int lines)
{
    char line[4096];
    size_t length = 0;

    while (lines > 0) {
        if (read(fd, line + length, 1) != 1)
            return -1;
        if (line[length++] == '\n') {
            put(fd, line, length);
            length = 0;
            lines--;
        }
    }
    return 0;
}

static void receive(int through)
{
    char byte, space[CMSG_SPACE(sizeof(int))];
    struct iovec piece = { &byte, 1 };
    struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1,
                              .msg_control = space, .msg_controllen = sizeof space };
    while (recvmsg(through, &message, 0) == 1) {
        int fd;
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
        echo(fd);
        close(fd);
        message.msg_controllen = sizeof space;
    }
}

static void give(int through, int fd)
{
    char byte = 'x', space[CMSG_SPACE(sizeof(int))] = { 0 };
    struct iovec piece = { &byte, 1 };
    struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1,
                              .msg_control = space, .msg_controllen = sizeof space };
    struct cmsghdr *control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(control), &fd, sizeof fd);
    if (sendmsg(through, &message, 0) != 1)
        exit(4);
}

static void spawn(int peer, const char *how, char *program, char *mode, char *number)
{
    char *words[] = { program, mode, number, NULL };
    posix_spawn_file_actions_t actions;
    pid_t child;
    int error;

    posix_spawn_file_actions_init(&actions);
    if (strncmp(how, "leak", 4) != 0) {
        posix_spawn_file_actions_adddup2(&actions, peer, 0);
        posix_spawn_file_actions_adddup2(&actions, peer, 1);
    }
    if (strcmp(how, "spawnp") == 0)
        error = posix_spawnp(&child, "beside-static", &actions, NULL, words, environ);
    else
        error = posix_spawn(&child, program, &actions, NULL, words, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error) {
        fprintf(stderr, "posix_spawn: %s\n", strerror(error));
        exit(5);
    }
}

static void serve(int port, const char *how, char *program)
{
    struct sockaddr_in address = { .sin_family = AF_INET };
    int one = 1, listener, peer, through[2];
    char line[4096], number[16];

    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8))
        exit(1);
    signal(SIGCHLD, SIG_IGN);
    if (strcmp(how, "pass") == 0) {
        socketpair(AF_UNIX, SOCK_STREAM, 0, through);
        if (fork() == 0) {
            close(listener);
            close(through[0]);
            sprintf(number, "%d", through[1]);
            execl(program, program, "receive", number, NULL);
            _exit(1);
        }
        close(through[1]);
    }
    while ((peer = accept(listener, NULL, NULL)) >= 0) {
        if (echo_lines(peer, 20) == 0) {
            sprintf(number, "%d", peer);
            if (strncmp(how, "spawn", 5) == 0) {
                fcntl(peer, F_SETFD, FD_CLOEXEC);
                spawn(peer, how, program, "echo", "0");
            } else if (strcmp(how, "exec") == 0) {
                if (fork() == 0) {
                    dup2(peer, 0);
                    execl(program, program, "echo", "0", NULL);
                    _exit(1);
                }
            } else if (strcmp(how, "leak-spawn") == 0) {
                spawn(peer, how, program, "idle", number);
                echo(peer);
            } else if (strcmp(how, "leak-exec") == 0) {
                if (fork() == 0) {
                    execl(program, program, "idle", number, NULL);
                    _exit(1);
                }
                echo(peer);
                shutdown(peer, SHUT_WR);
            } else if (strcmp(how, "pass") == 0) {
                give(through[0], peer);
            } else {
                /* The shell will not load the library; nor will what it runs. */
                unsetenv("LD_PRELOAD");
                sprintf(line, "read -r line <&%d; printf '%%s it'\"'\"'s\\n' \"$line\" >&%d;"
                        " exec '%s' echo %d", peer, peer, program, peer);
                if (strcmp(how, "system") == 0) {
                    system(line);
                } else {
                    char answer[100];
                    FILE *from;
                    strcat(line, "; echo not reached");
                    from = popen(line, "r");
                    while (fgets(answer, sizeof answer, from))
                        fputs(answer, stderr);
                    pclose(from);
                }
            }
        }
        close(peer);
    }
}

static void errors(const char *program)
{
    const char *paths[] = { "/no/such/program", "/etc/passwd", "/tmp", program };
    char *words[] = { "x", NULL };
    struct sockaddr_in address = { .sin_family = AF_INET };
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), one, other, index;
    char byte = 0;

    /* A connection of its own, accelerated at both ends. */
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bind(listener, (struct sockaddr *)&address, sizeof address);
    listen(listener, 1);
    getsockname(listener, (struct sockaddr *)&address, &length);
    one = socket(AF_INET, SOCK_STREAM, 0);
    connect(one, (struct sockaddr *)&address, sizeof address);
    other = accept(listener, NULL, NULL);
    put(one, "a", 1);
    read(other, &byte, 1);
    put(other, &byte, 1);
    read(one, &byte, 1);
    for (index = 0; index < 4; index++) {
        pid_t child = -1;
        int error = posix_spawn(&child, paths[index], NULL, NULL, words, environ);
        printf("%s:%d ", strerrorname_np(error) ? strerrorname_np(error) : "0", child > 0);
    }
    for (index = 0; index < 2; index++) {
        pid_t child = -1;
        int error = posix_spawnp(&child, index ? "beside-unreadable" : "no-such-program", NULL,
                                 NULL, words, environ);
        printf("%s:%d ", strerrorname_np(error), child > 0);
    }
    printf("children %d\n", waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD ? 0 : 1);
}

/* A connection of its own, each end closed by exec. */
static void connection(int ends[2])
{
    struct sockaddr_in address = { .sin_family = AF_INET };
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bind(listener, (struct sockaddr *)&address, sizeof address);
    listen(listener, 1);
    getsockname(listener, (struct sockaddr *)&address, &length);
    ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(ends[0], (struct sockaddr *)&address, sizeof address))
        exit(1);
    ends[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    close(listener);
}

/* There and back, by echo of this program or of another. */
static void talk(int ends[2], int here, int rounds)
{
    char bytes[100], back[100];
    int round, have;

    for (round = 0; round < rounds; round++) {
        memset(bytes, 'a' + round % 26, sizeof bytes);
        put(ends[0], bytes, sizeof bytes);
        if (here) {
            for (have = 0; have < sizeof back;)
                have += read(ends[1], back + have, sizeof back - have);
            put(ends[1], back, sizeof back);
        }
        for (have = 0; have < sizeof back;) {
            int count = read(ends[0], back + have, sizeof back - have);
            if (count <= 0)
                exit(6);
            have += count;
        }
        if (memcmp(bytes, back, sizeof bytes))
            exit(7);
    }
}

static void young(const char *how, char *program)
{
    char *words[] = { program, "answer", NULL };
    posix_spawn_file_actions_t actions;
    int ends[4][2], index, status, hands = strcmp(how, "hand") == 0;
    pid_t child;

    for (index = 0; index < 4; index++)
        connection(ends[index]);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, 2, 1);
    if (hands) {
        posix_spawn_file_actions_adddup2(&actions, ends[0][1], 0);
        posix_spawn_file_actions_adddup2(&actions, ends[1][1], 9);
    }
    if (posix_spawn(&child, program, &actions, NULL, words, environ))
        exit(5);
    posix_spawn_file_actions_destroy(&actions);
    for (index = 0; index < 4; index++)
        talk(ends[index], !(hands && index < 2), 40);
    for (index = 0; index < 4; index++) {
        shutdown(ends[index][0], SHUT_WR);
        close(ends[index][1]);
    }
    waitpid(child, &status, 0);
    printf("young %s %d\n", how, status);
}

/* On both at once: they are one another's turn to nobody. */
static void answer(void)
{
    pid_t other = fcntl(9, F_GETFD) < 0 ? -1 : fork();
    char bytes[4096];
    ssize_t count;
    int fd = other == 0 ? 9 : 0, status = 0;

    while ((count = read(fd, bytes, sizeof bytes)) > 0)
        put(fd, bytes, count);
    if (other == 0)
        _exit(count != 0);
    if (other > 0)
        waitpid(other, &status, 0);
    exit(count != 0 || status);
}

int main(int count, char **words)
{
    if (count == 5 && strcmp(words[1], "serve") == 0)
        serve(atoi(words[2]), words[3], words[4]);
    else if (count == 3 && strcmp(words[1], "echo") == 0)
        {int fd = atoi(words[2]); echo(fd); if (fd == 0) shutdown(fd, SHUT_RDWR);}
    else if (count == 3 && strcmp(words[1], "idle") == 0)
        sleep(2);
    else if (count == 3 && strcmp(words[1], "receive") == 0)
        receive(atoi(words[2]));
    else if (count == 3 && strcmp(words[1], "errors") == 0)
        errors(words[2]);
    else if (count == 4 && strcmp(words[1], "young") == 0)
        young(words[2], words[3]);
    else if (count == 2 && strcmp(words[1], "answer") == 0)
        answer();
    return 0;
}
