/* MQTT 3.1.1 with QoS 0, for the load generator. */
#include "stream.h"

#include <stdio.h>

enum { CONNECT = 0x10, CONNACK = 0x20, PUBLISH = 0x30, SUBSCRIBE = 0x82, SUBACK = 0x90 };
enum { PINGREQ = 0xc0, PINGRESP = 0xd0 };

struct link {
	struct stream stream;
	long answers, pings;
};

static void number(struct link *link, unsigned value)  /* two bytes, the high one first */
{
	char *at = stream_room(&link->stream, 2);
	at[0] = (char)(value >> 8);
	at[1] = (char)value;
}

static void string(struct link *link, const char *text)
{
	number(link, strlen(text));
	stream_text(&link->stream, text);
}

/* The length has seven bits a byte, the low ones first. */
static void begin_packet(struct link *link, int type, size_t rest)
{
	*stream_room(&link->stream, 1) = (char)type;
	for (; rest >= 128; rest >>= 7)
		*stream_room(&link->stream, 1) = (char)(rest & 127) | (char)128;
	*stream_room(&link->stream, 1) = (char)rest;
}

static size_t take(struct link *link, const char *from, size_t there)
{
	const unsigned char *bytes = (const unsigned char *)from, *body;
	size_t rest = 0, head = 1, topic;

	do {
		if (head >= there)
			return 0;
		rest |= (size_t)(bytes[head] & 127) << 7 * (head - 1);
	} while (bytes[head++] & 128);
	if (there < head + rest)
		return 0;
	body = bytes + head;
	switch (bytes[0] & 0xf0) {
	case CONNACK:
		if (body[1])
			fail("the broker refuses the connection: %d", body[1]);
		link->answers++;
		break;
	case SUBACK:
		if (body[2] & 128)
			fail("the broker refuses the subscription");
		break;
	case PINGRESP:
		link->pings++;
		break;
	case PUBLISH:
		topic = 2 + (body[0] << 8 | body[1]);
		arrived(body + topic, rest - topic);
		break;
	}
	return head + rest;
}

static struct link *mqtt_open(void)
{
	static int serial;
	struct link *link = calloc(1, sizeof *link);
	char name[32];

	if (!link)
		fail("no memory");
	stream_open(&link->stream, options.address, 0);
	snprintf(name, sizeof name, "bench%dn%d", getpid(), serial++);
	begin_packet(link, CONNECT, 10 + 2 + strlen(name));
	string(link, "MQTT");
	*stream_room(&link->stream, 1) = 4;  /* the version */
	*stream_room(&link->stream, 1) = 2;  /* a clean session */
	number(link, 0);                     /* no keep-alive */
	string(link, name);
	stream_await(link, &link->answers, 0);
	return link;
}

static void mqtt_subscribe(struct link *link, const char *topic, enum scope scope)
{
	char filter[80];
	snprintf(filter, sizeof filter, "%s%s", topic, scope == BELOW ? "/#" : "");
	begin_packet(link, SUBSCRIBE, 2 + 2 + strlen(filter) + 1);
	number(link, 1);
	string(link, filter);
	*stream_room(&link->stream, 1) = 0;  /* the QoS */
}

static void mqtt_publish(struct link *link, const char *topic, const void *payload, size_t size)
{
	begin_packet(link, PUBLISH, 2 + strlen(topic) + size);
	string(link, topic);
	stream_put(&link->stream, payload, size);
}

static void mqtt_settle(struct link *link)
{
	begin_packet(link, PINGREQ, 0);
	stream_await(link, &link->pings, link->pings);
}

const struct bus bus = {
	.open = mqtt_open,
	.subscribe = mqtt_subscribe,
	.publish = mqtt_publish,
	.flush = stream_flush,
	.receive = stream_receive,
	.settle = mqtt_settle,
};
