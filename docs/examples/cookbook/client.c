/* A client in C, without a library:
 *
 *   cc -std=c11 -Wall -o client client.c
 *   ./client sub /run/sbus.sock 'sensors/' [COUNT]    print messages, and exit after COUNT of them
 *   ./client pub /run/sbus.sock sensors/door open     publish one message
 *   ./client file /run/sbus.sock camera/1 frame.raw   publish a file in sealed memory, without copies on the bus
 *   ./client whoami /run/sbus.sock                    print the prefix of our secret keys
 */
#define _GNU_SOURCE

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define LONGEST 409600 /* bytes in the longest packet of a bus with default limits */

static char packet[LONGEST + 1];
static int memory = -1; /* the descriptor that came with the packet, if one did */

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
	union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr aligned; } control;
	struct iovec part = {packet, LONGEST};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	ssize_t length = recvmsg(bus, &message, MSG_CMSG_CLOEXEC);
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	if (length < 0)
		fail("recvmsg");
	if (memory >= 0)
		close(memory);
	memory = -1;
	if (length > 0 && header && header->cmsg_type == SCM_RIGHTS)
		memcpy(&memory, CMSG_DATA(header), sizeof(memory));
	if (length == 0) {
		fprintf(stderr, "the bus has closed the connection; its log says why\n");
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

/* Ask for large messages in sealed memory. A bus without them does not answer that, only the whoami behind it. */
static int bus_takes_payloads(int bus)
{
	int takes = 0;

	bus_send(bus, "CMSG", "payload/on", NULL, 0);
	bus_send(bus, "CMSG", "!/cred/whoami", NULL, 0);
	do {
		bus_receive(bus);
		takes |= !strcmp(packet, "CMSG payload/on");
	} while (strcmp(packet, "CMSG !/cred/whoami")); /* left unread, it would pass for the reply to a later whoami */
	return takes;
}

/* Publish a file as one message: copy it into a memfd, seal that, and send its descriptor. */
static void bus_publish_file(int bus, const char *key, const char *path)
{
	int file = open(path, O_RDONLY | O_CLOEXEC), copy = memfd_create("client", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr aligned; } control = {{0}};
	struct iovec part = {packet, 0};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	ssize_t count;
	long long size = 0;

	if (file < 0 || copy < 0)
		fail(path);
	while ((count = sendfile(copy, file, NULL, 1 << 30)) > 0)
		size += count;
	if (count < 0 || fcntl(copy, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) < 0)
		fail(path);
	part.iov_len = (size_t)snprintf(packet, LONGEST, "FMSG %s%c0 %lld", key, '\0', size);
	*CMSG_FIRSTHDR(&message) = (struct cmsghdr){CMSG_LEN(sizeof(copy)), SOL_SOCKET, SCM_RIGHTS};
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &copy, sizeof(copy));
	if (sendmsg(bus, &message, MSG_NOSIGNAL) < 0)
		fail("sendmsg");
	bus_whoami(bus); /* a bus that refused the message would end the connection */
}

/* Print a payload in sealed memory; `range` is its "<offset> <length>". The bus has checked memory and range. */
static void print_range(const char *range)
{
	long long offset, length;
	char *map;

	if (memory < 0 || sscanf(range, "%lld %lld", &offset, &length) != 2)
		return; /* a security module has removed the descriptor */
	map = mmap(NULL, (size_t)(offset + length), PROT_READ, MAP_PRIVATE, memory, 0);
	if (map == MAP_FAILED)
		fail("mmap");
	fwrite(map + offset, 1, (size_t)length, stdout);
	munmap(map, (size_t)(offset + length));
}

int main(int argc, char **argv)
{
	if (argc >= 4 && !strcmp(argv[1], "sub")) {
		int bus = bus_connect(argv[2]);
		long count = argc > 4 ? atol(argv[4]) : -1;

		bus_takes_payloads(bus); /* otherwise large messages come as far as they fit a packet */
		bus_send(bus, "SUB", argv[3], NULL, 0);
		fprintf(stderr, "subscribed as %s\n", bus_whoami(bus));
		while (count) {
			size_t length = bus_receive(bus);
			size_t head = strlen(packet) + 1; /* "MSG <key>" and the NUL */

			int is_large = !strncmp(packet, "FMSG ", 5);

			if ((strncmp(packet, "MSG ", 4) && !is_large) || head > length)
				continue; /* a control message */
			printf("%s: ", packet + 4 + is_large);
			if (is_large)
				print_range(packet + head);
			else
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
	if (argc == 5 && !strcmp(argv[1], "file")) {
		int bus = bus_connect(argv[2]);

		if (!bus_takes_payloads(bus)) {
			fprintf(stderr, "%s: this bus takes no payloads in sealed memory\n", argv[2]);
			return 1;
		}
		bus_publish_file(bus, argv[3], argv[4]);
		return 0;
	}
	if (argc == 3 && !strcmp(argv[1], "whoami")) {
		puts(bus_whoami(bus_connect(argv[2])));
		return 0;
	}
	fprintf(stderr, "usage: %s sub ADDRESS PATTERN [COUNT] | pub ADDRESS KEY PAYLOAD | file ADDRESS KEY FILE | whoami ADDRESS\n", argv[0]);
	return 2;
}
