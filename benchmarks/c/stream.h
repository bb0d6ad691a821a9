/* Bytes in and out of a stream socket, for the buses that speak over one. A file that includes this has such a
 * struct stream first in its struct link, so that stream_flush and stream_receive fit into struct bus.
 */
#ifndef STREAM_H
#define STREAM_H

#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct stream {
	int fd;
	char *in, *out;
	size_t taken, filled, in_room;  /* of `in`, bytes that were dealt with, that are there, that fit */
	size_t waiting, out_room;       /* of `out` */
};

/* How the file takes one message of its protocol off the input: how many bytes that were; 0 if it is not all there. */
static size_t take(struct link *, const char *from, size_t there);

static inline void stream_open(struct stream *stream, const char *path, int port)
{
	/* Small at first: there can be a thousand. */
	*stream = (struct stream){.fd = dial(SOCK_STREAM, path, port), .in_room = 4096, .out_room = 4096};
	stream->in = malloc(stream->in_room);
	stream->out = malloc(stream->out_room);
	if (!stream->in || !stream->out)
		fail("no memory");
}

/* Room for so many bytes at the end of the output. */
static inline char *stream_room(struct stream *stream, size_t size)
{
	char *at;
	if (stream->waiting + size > stream->out_room) {
		stream->out_room = 2 * (stream->waiting + size);
		if (!(stream->out = realloc(stream->out, stream->out_room)))
			fail("no memory");
	}
	at = stream->out + stream->waiting;
	stream->waiting += size;
	return at;
}

static inline void stream_put(struct stream *stream, const void *bytes, size_t size)
{
	memcpy(stream_room(stream, size), bytes, size);
}

static inline void stream_text(struct stream *stream, const char *text)
{
	stream_put(stream, text, strlen(text));
}

static inline void stream_flush(struct link *link)
{
	struct stream *stream = (struct stream *)link;
	for (size_t sent = 0; sent < stream->waiting;) {
		ssize_t count = send(stream->fd, stream->out + sent, stream->waiting - sent, MSG_NOSIGNAL);
		if (count < 0 && errno != EINTR)
			fail("cannot send: %s", strerror(errno));
		if (count > 0)
			sent += count;
	}
	stream->waiting = 0;
}

/* One read, and all messages that are complete then. */
static inline bool stream_receive(struct link *link)
{
	struct stream *stream = (struct stream *)link;
	size_t size, room;
	ssize_t count;

	if (stream->filled == stream->in_room) {
		size_t wanted = stream->in_room < 262144 ? 262144 : 2 * stream->in_room;
		if (!(stream->in = realloc(stream->in, wanted)))
			fail("no memory");
		stream->in_room = wanted;
	}
	room = stream->in_room - stream->filled;
	while ((count = recv(stream->fd, stream->in + stream->filled, room, 0)) < 0 && errno == EINTR)
		;
	if (count <= 0)
		return false;
	stream->filled += count;
	while ((size = take(link, stream->in + stream->taken, stream->filled - stream->taken)))
		stream->taken += size;
	stream->filled -= stream->taken;
	memmove(stream->in, stream->in + stream->taken, stream->filled);
	stream->taken = 0;
	return true;
}

/* Receive until a count that `take` keeps is above `before`. */
static inline void stream_await(struct link *link, const long *count, long before)
{
	stream_flush(link);
	while (*count == before)
		if (!stream_receive(link))
			fail("no answer from the server");
}

#endif
