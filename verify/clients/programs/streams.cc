// Echoes lines with C++'s streams as standard input and output: streams held PORT, or standard.
#include <arpa/inet.h>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <sys/socket.h>
#include <unistd.h>

static int echo()
{
    std::string line;
    while (std::getline(std::cin, line))
        std::cout << line << std::endl;
    std::cout << "over" << std::endl;
    return 0;
}

int main(int count, char **words)
{
    if (count == 2)
        return echo();
    sockaddr_in address = {};
    int one = 1, peer, listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    address.sin_family = AF_INET;
    address.sin_port = htons(std::atoi(words[2]));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, reinterpret_cast<sockaddr *>(&address), sizeof address) || listen(listener, 8))
        return 1;
    while ((peer = accept(listener, nullptr, nullptr)) >= 0) {
        if (fork() == 0) {
            char first;
            recv(peer, &first, 1, MSG_PEEK);
            if (std::strcmp(words[1], "held") == 0)
                std::cout << "held ";
            dup2(peer, 0);
            dup2(peer, 1);
            close(peer);
            if (std::strcmp(words[1], "exec") == 0)
                execl(words[3], words[3], "standard", nullptr);
            return echo();
        }
        close(peer);
    }
}
