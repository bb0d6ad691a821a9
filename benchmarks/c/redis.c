/* The publish and subscribe part of Redis (RESP 2), for the load generator. */
#include "stream.h"

#include <stdio.h>

/* Redis answers a publication with a number. This is the limit of answers due before we read some. */
enum { MOST_DUE = 1024 };

struct link {
	struct stream stream;
	long due, pongs;
};

static void command(struct link *link, int words, const char *word[], const size_t size[])
{
	char head[32];

	stream_put(&link->stream, head, snprintf(head, sizeof head, "*%d\r\n", words));
	for (int i = 0; i < words; i++) {
		stream_put(&link->stream, head, snprintf(head, sizeof head, "$%zu\r\n", size[i]));
		stream_put(&link->stream, word[i], size[i]);
		stream_text(&link->stream, "\r\n");
	}
}

/* The end of the line that begins there; NULL if it has none yet. */
static const char *line_end(const char *from, const char *end)
{
	const char *at = memchr(from, '\n', end - from);
	return at ? at + 1 : NULL;
}

static size_t take(struct link *link, const char *from, size_t there)
{
	const char *end = from + there, *at, *part[4] = {0};
	size_t size[4] = {0};
	int parts;

	if (!there || !(at = line_end(from, end)))
		return 0;
	switch (*from) {
	case ':':
		link->due--;
		return at - from;
	case '+':
		link->pongs++;
		return at - from;
	case '*':
		break;
	default:
		fail("redis says: %.*s", (int)(at - from), from);
	}
	parts = atoi(from + 1);
	for (int i = 0; i < parts && i < 4; i++) {
		const char *line = at;
		if (!(at = line_end(line, end)))
			return 0;
		if (*line == '$') {
			part[i] = at;
			size[i] = strtoul(line + 1, NULL, 10);
			if ((size_t)(end - at) < size[i] + 2)
				return 0;
			at += size[i] + 2;
		}
	}
	if (size[0] == 4 && !memcmp(part[0], "pong", 4))
		link->pongs++;
	else if ((size[0] == 7 && !memcmp(part[0], "message", 7)) || (size[0] == 8 && !memcmp(part[0], "pmessage", 8)))
		arrived(part[parts - 1], size[parts - 1]);
	return at - from;
}

static struct link *redis_open(void)
{
	struct link *link = calloc(1, sizeof *link);
	if (!link)
		fail("no memory");
	stream_open(&link->stream, options.address, 0);
	return link;
}

static void redis_subscribe(struct link *link, const char *topic, enum scope scope)
{
	char pattern[80];
	int size = snprintf(pattern, sizeof pattern, "%s%s", topic, scope == BELOW ? "/*" : "");
	const char *verb = scope == BELOW ? "PSUBSCRIBE" : "SUBSCRIBE";
	command(link, 2, (const char *[]){verb, pattern}, (size_t[]){strlen(verb), size});
}

static void redis_publish(struct link *link, const char *topic, const void *payload, size_t size)
{
	command(link, 3, (const char *[]){"PUBLISH", topic, payload}, (size_t[]){7, strlen(topic), size});
	link->due++;
}

static void redis_flush(struct link *link)
{
	stream_flush(link);
	while (link->due > MOST_DUE)
		if (!stream_receive(link))
			fail("no answers from the server");
}

static void redis_settle(struct link *link)
{
	command(link, 1, (const char *[]){"PING"}, (size_t[]){4});
	stream_await(link, &link->pongs, link->pongs);
}

const struct bus bus = {
	.deaf = true,
	.open = redis_open,
	.subscribe = redis_subscribe,
	.publish = redis_publish,
	.flush = redis_flush,
	.receive = stream_receive,
	.settle = redis_settle,
};
