/* Packets of sbus, for the load generator. What is published between two flushes goes with one sendmmsg, or, with
 * `bundles`, in as few packets as hold it. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 64, HEAD = 128, LARGEST_BUNDLE = 65536 };

#define NOTICE "CMSG sender"

struct link {
	int fd;
};

/* The packets in hand: of all connections, as none is ever left with some that wait. */
static struct mmsghdr out[MOST], in[MOST];
static struct iovec out_at[MOST], in_at[MOST];
static int waiting;
static size_t longest;  /* bytes in a packet that may come */

static void make_room(struct mmsghdr *headers, struct iovec *at)
{
	longest = HEAD + options.size;
	if (options.bundles && longest < LARGEST_BUNDLE)
		longest = LARGEST_BUNDLE;
	for (int i = 0; i < MOST; i++) {
		at[i].iov_len = longest;
		if (!(at[i].iov_base = malloc(at[i].iov_len)))
			fail("no memory");
		headers[i].msg_hdr.msg_iov = &at[i];
		headers[i].msg_hdr.msg_iovlen = 1;
	}
}

static void put(struct link *link, const void *packet, size_t size)
{
	while (send(link->fd, packet, size, MSG_NOSIGNAL) < 0)
		if (errno != EINTR)
			fail("cannot send: %s", strerror(errno));
}

/* Returns the number in the answer. */
static long ask(struct link *link, const char *question)
{
	char answer[HEAD];
	size_t length = strlen(question);
	ssize_t size;

	put(link, question, length);
	while ((size = recv(link->fd, answer, sizeof answer - 1, 0)) < 0 && errno == EINTR)
		;
	if (size <= (ssize_t)length || memcmp(answer, question, length + 1))
		fail("the server does not answer %s", question);
	answer[size] = 0;
	return atol(answer + length + 1);
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
	if (options.bundles && ask(link, "CMSG bundle/on") < LARGEST_BUNDLE)
		fail("the server takes no bundles of %d bytes", LARGEST_BUNDLE);
	return link;
}

static void sbus_close(struct link *link)
{
	close(link->fd);
	free(link);
}

static void verb(struct link *link, const char *verb, const char *topic, enum scope scope)
{
	char packet[HEAD];
	put(link, packet, snprintf(packet, sizeof packet, "%s %s%s", verb, topic, scope == BELOW ? "/" : ""));
}

static void sbus_subscribe(struct link *link, const char *topic, enum scope scope)
{
	if (options.senders)
		ask(link, "CMSG sender/on");
	verb(link, "SUB", topic, scope);
}

static void sbus_unsubscribe(struct link *link, const char *topic, enum scope scope)
{
	verb(link, "UNSUB", topic, scope);
}

/* As many of the waiting packets, from `at` on, as fit a bundle; returns how many those are. */
static int put_bundle(struct link *link, int at)
{
	static unsigned char bundle[LARGEST_BUNDLE];
	size_t size = 4;
	int end = at;

	memcpy(bundle, "BNDL", 4);
	for (; end < waiting && size + 4 + out_at[end].iov_len <= sizeof bundle; end++) {
		uint32_t length = (uint32_t)out_at[end].iov_len;
		for (int i = 0; i < 4; i++)
			bundle[size++] = length >> (8 * i) & 255;
		memcpy(bundle + size, out_at[end].iov_base, length);
		size += length;
	}
	if (end - at > 1) {
		put(link, bundle, size);
		return end - at;
	}
	put(link, out_at[at].iov_base, out_at[at].iov_len);
	return 1;
}

static void sbus_flush(struct link *link)
{
	if (options.bundles) {
		for (int sent = 0; sent < waiting;)
			sent += put_bundle(link, sent);
		waiting = 0;
		return;
	}
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

static bool is_notice(const char *packet, size_t size)
{
	return options.senders && size > strlen(NOTICE) && !memcmp(packet, NOTICE, strlen(NOTICE) + 1);
}

static void look_at(char *packet, size_t size)
{
	char *nul = memchr(packet, 0, size);

	if (is_notice(packet, size))
		return;
	if (nul && size > 4 && !memcmp(packet, "MSG ", 4))
		arrived(nul + 1, packet + size - (nul + 1));
	else
		arrived(packet, 0);
}

/* Each packet of a bundle; one that is not framed as it should be counts as a wrong message. */
static void take_apart(char *bundle, size_t size)
{
	for (size_t at = 4; at < size;) {
		size_t length = 0;
		for (int i = 0; i < 4 && at < size; i++)
			length |= (size_t)(unsigned char)bundle[at++] << (8 * i);
		if (length == 0 || length > size - at) {
			arrived(bundle, 0);
			return;
		}
		look_at(bundle + at, length);
		at += length;
	}
}

static bool sbus_receive(struct link *link)
{
	int count;

	for (int i = 0; i < MOST; i++)
		in_at[i].iov_len = longest;
	while ((count = recvmmsg(link->fd, in, MOST, MSG_WAITFORONE, NULL)) < 0 && errno == EINTR)
		;
	for (int i = 0; i < count; i++) {
		char *packet = in_at[i].iov_base;
		size_t size = in[i].msg_len;
		if (!size)
			return false;
		if (in[i].msg_hdr.msg_flags & MSG_TRUNC)
			arrived(packet, 0);
		else if (options.bundles && size > 4 && !memcmp(packet, "BNDL", 4))
			take_apart(packet, size);
		else
			look_at(packet, size);
	}
	return count > 0;
}

/* A message to ourselves comes back when all before it is done. */
static void sbus_settle(struct link *link)
{
	static int serial;
	char key[64], packet[4 * HEAD];
	ssize_t size;

	snprintf(key, sizeof key, "settle/%d/%d", getpid(), serial++);
	verb(link, "SUB", key, EXACT);
	put(link, packet, snprintf(packet, sizeof packet, "MSG %s", key) + 1);
	while (((size = recv(link->fd, packet, sizeof packet, 0)) < 0 && errno == EINTR) ||
	       (size > 0 && is_notice(packet, (size_t)size)))
		;
	if (size <= 4 || !memmem(packet, (size_t)size, key, strlen(key)))  /* it may be in a bundle, behind a notice */
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
