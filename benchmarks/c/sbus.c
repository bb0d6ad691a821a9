/* Packets of sbus, for the load generator. What is published between two flushes goes with one sendmmsg. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 64, HEAD = 128 };

struct link {
	int fd;
};

/* The packets in hand: of all connections, as none is ever left with some that wait. */
static struct mmsghdr out[MOST], in[MOST];
static struct iovec out_at[MOST], in_at[MOST];
static int waiting;

static void make_room(struct mmsghdr *headers, struct iovec *at)
{
	for (int i = 0; i < MOST; i++) {
		at[i].iov_len = HEAD + options.size;
		if (!(at[i].iov_base = malloc(at[i].iov_len)))
			fail("no memory");
		headers[i].msg_hdr.msg_iov = &at[i];
		headers[i].msg_hdr.msg_iovlen = 1;
	}
}

static struct link *sbus_open(void)
{
	struct link *link = malloc(sizeof *link);
	if (!link)
		fail("no memory");
	if (!out_at->iov_base) {
		make_room(out, out_at);
		make_room(in, in_at);
	}
	link->fd = dial(SOCK_SEQPACKET, options.address, 0);
	return link;
}

static void sbus_close(struct link *link)
{
	close(link->fd);
	free(link);
}

static void put(struct link *link, const void *packet, size_t size)
{
	while (send(link->fd, packet, size, MSG_NOSIGNAL) < 0)
		if (errno != EINTR)
			fail("cannot send: %s", strerror(errno));
}

static void verb(struct link *link, const char *verb, const char *topic, enum scope scope)
{
	char packet[HEAD];
	put(link, packet, snprintf(packet, sizeof packet, "%s %s%s", verb, topic, scope == BELOW ? "/" : ""));
}

static void sbus_subscribe(struct link *link, const char *topic, enum scope scope)
{
	verb(link, "SUB", topic, scope);
}

static void sbus_unsubscribe(struct link *link, const char *topic, enum scope scope)
{
	verb(link, "UNSUB", topic, scope);
}

static void sbus_flush(struct link *link)
{
	if (waiting == 1)
		put(link, out_at->iov_base, out_at->iov_len);
	for (int sent = 0; waiting > 1 && sent < waiting;) {
		int count = sendmmsg(link->fd, out + sent, waiting - sent, MSG_NOSIGNAL);
		if (count < 0 && errno != EINTR)
			fail("cannot send: %s", strerror(errno));
		if (count > 0)
			sent += count;
	}
	waiting = 0;
}

static void sbus_publish(struct link *link, const char *topic, const void *payload, size_t size)
{
	size_t key = strlen(topic) + 1;
	char *packet = out_at[waiting].iov_base;

	memcpy(packet, "MSG ", 4);
	memcpy(packet + 4, topic, key);
	memcpy(packet + 4 + key, payload, size);
	out_at[waiting].iov_len = 4 + key + size;
	if (++waiting == MOST)
		sbus_flush(link);
}

static bool sbus_receive(struct link *link)
{
	int count;

	for (int i = 0; i < MOST; i++)
		in_at[i].iov_len = HEAD + options.size;
	while ((count = recvmmsg(link->fd, in, MOST, MSG_WAITFORONE, NULL)) < 0 && errno == EINTR)
		;
	for (int i = 0; i < count; i++) {
		char *packet = in_at[i].iov_base, *nul;
		if (!in[i].msg_len)
			return false;
		nul = memchr(packet, 0, in[i].msg_len);
		if (nul && !memcmp(packet, "MSG ", 4) && !(in[i].msg_hdr.msg_flags & MSG_TRUNC))
			arrived(nul + 1, packet + in[i].msg_len - (nul + 1));
		else
			arrived(packet, 0);
	}
	return count > 0;
}

/* A message to ourselves comes back when all before it is done. */
static void sbus_settle(struct link *link)
{
	static int serial;
	char key[64], packet[HEAD];
	ssize_t size;

	snprintf(key, sizeof key, "settle/%d/%d", getpid(), serial++);
	verb(link, "SUB", key, EXACT);
	put(link, packet, snprintf(packet, sizeof packet, "MSG %s", key) + 1);
	while ((size = recv(link->fd, packet, sizeof packet, 0)) < 0 && errno == EINTR)
		;
	if (size <= 4 || memcmp(packet + 4, key, size - 4))
		fail("the server has not dealt with what it was sent");
	verb(link, "UNSUB", key, EXACT);
}

const struct bus bus = {
	.open = sbus_open,
	.close = sbus_close,
	.subscribe = sbus_subscribe,
	.unsubscribe = sbus_unsubscribe,
	.publish = sbus_publish,
	.flush = sbus_flush,
	.receive = sbus_receive,
	.settle = sbus_settle,
};
