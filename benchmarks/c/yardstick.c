/* The yardstick: the bus that one writes in C in an afternoon, for all others to be compared with.
 *
 *     yardstick SOCKET
 *
 * One thread, one recv and one send for each packet, every pattern of every client compared with every key. It knows
 * SUB, UNSUB and MSG, and does without what makes a bus dependable: it has no credentials, reserved keys, limits, flood
 * control or counters, and a client that does not read stops all others.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { LONGEST = 409600, EVENTS = 64 };

struct client {
	int fd;
	int place;          /* in clients */
	int patterns, room;
	char **pattern;
};

static struct client **clients;
static int connected, room;
static int poller;

static void *grown(void *array, int *room, size_t item)
{
	*room = *room ? 2 * *room : 4;
	if (!(array = realloc(array, *room * item)))
		abort();
	return array;
}

/* No backtracking: a star takes all up to the next separator. */
static int matches(const char *pattern, const char *key)
{
	if (!*pattern)
		return 1;
	for (const char *p = pattern;;) {
		if (*p == '*') {
			key += strcspn(key, "/");
			p++;
		} else if (!*p) {
			return !*key || p[-1] == '/';
		} else if (*p++ != *key++) {
			return 0;
		}
	}
}

static void enter(int fd)
{
	struct client *client = calloc(1, sizeof *client);
	struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = client};

	if (!client)
		abort();
	if (connected == room)
		clients = grown(clients, &room, sizeof *clients);
	client->fd = fd;
	client->place = connected;
	clients[connected++] = client;
	epoll_ctl(poller, EPOLL_CTL_ADD, fd, &wanted);
}

static void leave(struct client *client)
{
	close(client->fd);
	clients[client->place] = clients[--connected];
	clients[client->place]->place = client->place;
	while (client->patterns)
		free(client->pattern[--client->patterns]);
	free(client->pattern);
	free(client);
}

static void subscribe(struct client *client, const char *pattern)
{
	if (client->patterns == client->room)
		client->pattern = grown(client->pattern, &client->room, sizeof *client->pattern);
	if (!(client->pattern[client->patterns++] = strdup(pattern)))
		abort();
}

static void unsubscribe(struct client *client, const char *pattern)
{
	for (int i = 0; i < client->patterns; i++) {
		if (!strcmp(client->pattern[i], pattern)) {
			free(client->pattern[i]);
			client->pattern[i] = client->pattern[--client->patterns];
			return;
		}
	}
}

static void publish(const char *packet, size_t size)
{
	for (int c = 0; c < connected; c++) {
		struct client *client = clients[c];
		for (int i = 0; i < client->patterns; i++) {
			if (matches(client->pattern[i], packet + 4)) {
				send(client->fd, packet, size, MSG_NOSIGNAL);
				break;
			}
		}
	}
}

static void serve(struct client *client)
{
	static char packet[LONGEST + 1];
	ssize_t size = recv(client->fd, packet, LONGEST, 0);

	if (size <= 0) {
		leave(client);
		return;
	}
	packet[size] = 0;
	if (!strncmp(packet, "MSG ", 4))
		publish(packet, size);
	else if (!strncmp(packet, "SUB ", 4))
		subscribe(client, packet + 4);
	else if (!strncmp(packet, "UNSUB ", 6))
		unsubscribe(client, packet + 6);
}

int main(int argc, char **argv)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct epoll_event ready[EVENTS] = {{.events = EPOLLIN}};
	int fd, listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	if (argc != 2 || strlen(argv[1]) >= sizeof address.sun_path) {
		fprintf(stderr, "usage: yardstick SOCKET\n");
		return 2;
	}
	strcpy(address.sun_path, argv[1]);
	poller = epoll_create1(0);
	if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, SOMAXCONN) ||
	    epoll_ctl(poller, EPOLL_CTL_ADD, listener, ready)) {
		perror(argv[1]);
		return 1;
	}
	for (;;) {
		int count = epoll_wait(poller, ready, EVENTS, -1);
		for (int i = 0; i < count; i++) {
			if (ready[i].data.ptr)
				serve(ready[i].data.ptr);  /* each client is in there once: it can leave */
			else if ((fd = accept(listener, NULL, NULL)) >= 0)
				enter(fd);
		}
	}
}
