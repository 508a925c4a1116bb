/* Echoes lines with the C library's streams: streams MODE PORT [PROGRAM].
   "streams": over fdopen(); "dprintf": answers by it; "exec", "execl", "execle": as standard input
   and output of PROGRAM, which is this one, perhaps linked otherwise; "held": as its own standard
   input and output, with a word written to the latter before. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void echo(FILE *in, FILE *out)
{
    char line[4096];
    while (fgets(line, sizeof line, in)) {
        fputs(line, out);
        fflush(out);
    }
    fputs("over\n", out);
}

/* Echoes "line NUMBER TEXT" with arguments of each kind, more than there are registers. */
static void tell(int peer, const char *line)
{
    static char text[4096];
    int turn = 0;

    text[0] = 0;
    sscanf(line, "line %d %4095s", &turn, text);
    dprintf(peer, "%.0d%.0d%.0d%s %.0f %.0d%.0d%s\n", 0, 0, 0, "line", (double)turn, 0, 0, text);
}

int main(int count, char **words)
{
    struct sockaddr_in address = { .sin_family = AF_INET };
    int one = 1, listener, peer;

    if (count == 2 && strcmp(words[1], "standard") == 0) {
        echo(stdin, stdout);
        return 0;
    }
    listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    address.sin_port = htons(atoi(words[2]));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8))
        return 1;
    while ((peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
        if (strcmp(words[1], "held") == 0) {
            if (fork() == 0) {
                char first;
                recv(peer, &first, 1, MSG_PEEK);
                fputs("held ", stdout);
                dup2(peer, 0);
                dup2(peer, 1);
                close(peer);
                echo(stdin, stdout);
                exit(0);
            }
            close(peer);
            continue;
        }
        if (strncmp(words[1], "exec", 4) == 0) {
            if (fork() == 0) {
                char first;
                /* By then the other end is there, with whatever it has found out. */
                recv(peer, &first, 1, MSG_PEEK);
                dup2(peer, 0);
                dup2(peer, 1);
                char *again[] = { words[3], "standard", NULL };
                if (strcmp(words[1], "execl") == 0)
                    execl(words[3], words[3], "standard", NULL);
                else if (strcmp(words[1], "execle") == 0)
                    execle(words[3], words[3], "standard", NULL, environ);
                else
                    execv(words[3], again);
                _exit(1);
            }
            close(peer);
            while (waitpid(-1, NULL, WNOHANG) > 0)
                ;
            continue;
        }
        FILE *in = fdopen(peer, "r"), *out = fdopen(dup(peer), "w");
        if (!in || !out || fileno(in) != peer)
            return 2;
        if (strcmp(words[1], "dprintf") == 0) {
            char line[4096];
            while (fgets(line, sizeof line, in))
                tell(peer, line);
            dprintf(peer, "over\n");
        } else {
            echo(in, out);
        }
        fclose(out);
        fclose(in);
    }
    return 0;
}
