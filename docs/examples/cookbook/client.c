/* A client in C, without a library:
 *
 *   cc -std=c11 -Wall -o client client.c
 *   ./client sub /run/sbus.sock 'sensors/' [COUNT]    print messages, and exit after COUNT of them
 *   ./client pub /run/sbus.sock sensors/door open     publish one message
 *   ./client whoami /run/sbus.sock                    print the prefix of our secret keys
 */
#define _POSIX_C_SOURCE 200809L

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define LONGEST 409600 /* bytes in the longest packet of a bus with default limits */

static char packet[LONGEST + 1];

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* Connect. An address that begins with '@' is an abstract one: no file, and a NUL in place of the '@'. */
static int bus_connect(const char *address)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	size_t length = strlen(address);
	int buffer = LONGEST + 32;
	int bus = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (bus < 0)
		fail("socket");
	if (length >= sizeof(name.sun_path)) {
		fprintf(stderr, "%s: too long for a socket\n", address);
		exit(1);
	}
	memcpy(name.sun_path, address, length);
	if (address[0] == '@')
		name.sun_path[0] = '\0';
	/* By default, the kernel refuses to send packets longer than about half the limit. */
	setsockopt(bus, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
	/* Give the exact length: in an abstract address, trailing NULs would be part of the name. */
	if (connect(bus, (struct sockaddr *)&name,
		    offsetof(struct sockaddr_un, sun_path) + length + (address[0] != '@')))
		fail(address);
	return bus;
}

/* Send one packet: a verb, a key, and (unless it is NULL) a NUL and a payload. */
static void bus_send(int bus, const char *verb, const char *key, const void *payload, size_t size)
{
	size_t verb_size = strlen(verb), key_size = strlen(key);
	size_t length = verb_size + 1 + key_size + (payload ? 1 + size : 0);
	char *at = packet;

	if (length > LONGEST) {
		fprintf(stderr, "%s: too long for a packet\n", key);
		exit(1);
	}
	memcpy(at, verb, verb_size);
	at += verb_size;
	*at++ = ' ';
	memcpy(at, key, key_size);
	at += key_size;
	if (payload) {
		*at++ = '\0';
		memcpy(at, payload, size);
	}
	/* Without MSG_NOSIGNAL, SIGPIPE would end this program after the server has gone. */
	if (send(bus, packet, length, MSG_NOSIGNAL) < 0)
		fail("send");
}

/* Receive one packet, and return its length. A NUL is appended, so that the packet can be printed. */
static size_t bus_receive(int bus)
{
	ssize_t length = recv(bus, packet, LONGEST, 0);

	if (length < 0)
		fail("recv");
	if (length == 0) {
		fprintf(stderr, "the bus has closed the connection\n");
		exit(1);
	}
	packet[length] = '\0';
	return (size_t)length;
}

/* Ask for our name at the server. The reply also shows that everything sent before is in force. */
static const char *bus_whoami(int bus)
{
	const char *reply = "CMSG !/cred/whoami";

	bus_send(bus, "CMSG", "!/cred/whoami", NULL, 0);
	do
		bus_receive(bus); /* a program with subscriptions would handle messages here */
	while (strcmp(packet, reply));
	return packet + strlen(reply) + 1;
}

int main(int argc, char **argv)
{
	if (argc >= 4 && !strcmp(argv[1], "sub")) {
		int bus = bus_connect(argv[2]);
		long count = argc > 4 ? atol(argv[4]) : -1;

		bus_send(bus, "SUB", argv[3], NULL, 0);
		fprintf(stderr, "subscribed as %s\n", bus_whoami(bus));
		while (count) {
			size_t length = bus_receive(bus);
			size_t head = strlen(packet) + 1; /* "MSG <key>" and the NUL */

			if (strncmp(packet, "MSG ", 4) || head > length)
				continue; /* a control message */
			printf("%s: ", packet + 4);
			fwrite(packet + head, 1, length - head, stdout); /* it may contain NULs */
			putchar('\n');
			fflush(stdout);
			count--;
		}
		return 0;
	}
	if (argc == 5 && !strcmp(argv[1], "pub")) {
		bus_send(bus_connect(argv[2]), "MSG", argv[3], argv[4], strlen(argv[4]));
		return 0;
	}
	if (argc == 3 && !strcmp(argv[1], "whoami")) {
		puts(bus_whoami(bus_connect(argv[2])));
		return 0;
	}
	fprintf(stderr, "usage: %s sub ADDRESS PATTERN [COUNT] | pub ADDRESS KEY PAYLOAD | whoami ADDRESS\n", argv[0]);
	return 2;
}
