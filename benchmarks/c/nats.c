/* The text protocol of NATS, for the load generator. The address is a port on the loopback, as nats-server knows no
 * other kind. */
#include "stream.h"

#include <stdio.h>

struct link {
	struct stream stream;
	long pongs;
	int subscriptions;
};

/* Subjects have dots. */
static const char *subject(const char *topic, enum scope scope)
{
	static char text[80];
	snprintf(text, sizeof text, "%s%s", topic, scope == BELOW ? ".>" : "");
	for (char *at = text; (at = strchr(at, '/'));)
		*at = '.';
	return text;
}

static size_t take(struct link *link, const char *from, size_t there)
{
	const char *line = there ? memchr(from, '\n', there) : NULL, *number;
	size_t size;

	if (!line++)
		return 0;
	switch (from[0]) {
	case 'M':  /* MSG <subject> <sid> [reply-to] <bytes> */
		for (number = line - 2; number[-1] != ' '; number--)
			;
		size = strtoul(number, NULL, 10);
		if ((size_t)(line - from) + size + 2 > there)
			return 0;
		arrived(line, size);
		return line - from + size + 2;
	case 'P':
		if (from[1] == 'O') {
			link->pongs++;
		} else {
			stream_text(&link->stream, "PONG\r\n");
			stream_flush(link);
		}
		break;
	case '-':
		fail("nats says: %.*s", (int)(line - from), from);
	}
	return line - from;
}

static void nats_settle(struct link *link)
{
	stream_text(&link->stream, "PING\r\n");
	stream_await(link, &link->pongs, link->pongs);
}

static struct link *nats_open(void)
{
	struct link *link = calloc(1, sizeof *link);
	if (!link)
		fail("no memory");
	stream_open(&link->stream, "", atoi(options.address));
	stream_text(&link->stream, "CONNECT {\"verbose\":false,\"pedantic\":false,\"lang\":\"c\",\"version\":\"1\"}\r\n");
	nats_settle(link);
	return link;
}

static void nats_subscribe(struct link *link, const char *topic, enum scope scope)
{
	char line[128];
	int size = snprintf(line, sizeof line, "SUB %s %d\r\n", subject(topic, scope), ++link->subscriptions);
	stream_put(&link->stream, line, size);
}

static void nats_publish(struct link *link, const char *topic, const void *payload, size_t size)
{
	char line[128];
	stream_put(&link->stream, line, snprintf(line, sizeof line, "PUB %s %zu\r\n", subject(topic, EXACT), size));
	stream_put(&link->stream, payload, size);
	stream_text(&link->stream, "\r\n");
}

const struct bus bus = {
	.open = nats_open,
	.subscribe = nats_subscribe,
	.publish = nats_publish,
	.flush = stream_flush,
	.receive = stream_receive,
	.settle = nats_settle,
};
