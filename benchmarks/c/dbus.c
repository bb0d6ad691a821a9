/* D-Bus signals, for the load generator: the topic is the object's path, the payload an array of bytes. */
#include "stream.h"

#include <stdio.h>

enum { CALL = 1, RETURN = 2, ERROR = 3, SIGNAL = 4 };
enum { NO_REPLY = 1 };

struct link {
	struct stream stream;
	bool is_authenticated, has_subscribed;
	uint32_t serial;
	long returns;
};

static void uint32(char *at, uint32_t value)
{
	memcpy(at, &value, sizeof value);
}

static uint32_t to_uint32(const char *at)
{
	uint32_t value;
	memcpy(&value, at, sizeof value);
	return value;
}

static size_t aligned(size_t at, size_t to)
{
	return (at + to - 1) & ~(to - 1);
}

/* One field of the header: a number, and a variant that holds a text. Returns where it ends. */
static size_t field(char *header, size_t at, int code, char type, const char *text)
{
	size_t size = strlen(text);

	at = aligned(at, 8);
	header[at] = (char)code;
	header[at + 1] = 1;
	header[at + 2] = type;
	header[at + 3] = 0;
	if (type == 'g') {
		header[at + 4] = (char)size;
		at += 5;
	} else {
		uint32(header + at + 4, size);
		at += 8;
	}
	memcpy(header + at, text, size + 1);
	return at + size + 1;
}

/* A message whose body is one string ("s"), one array of bytes ("ay") or nothing (""). */
static void message(struct link *link, int type, const char *path, const char *interface, const char *member,
		    const char *destination, const char *signature, const void *body, size_t size)
{
	char header[512] = {'l', (char)type, type == SIGNAL ? NO_REPLY : 0, 1}, *at;
	size_t end, whole = !*signature ? 0 : 4 + size + (*signature == 's');

	uint32(header + 4, whole);
	uint32(header + 8, ++link->serial);
	end = field(header, 16, 1, 'o', path);
	end = field(header, end, 2, 's', interface);
	end = field(header, end, 3, 's', member);
	if (destination)
		end = field(header, end, 6, 's', destination);
	if (*signature)
		end = field(header, end, 8, 'g', signature);
	uint32(header + 12, end - 16);
	stream_put(&link->stream, header, aligned(end, 8));
	if (whole) {
		at = stream_room(&link->stream, whole);
		uint32(at, size);
		memcpy(at + 4, body, size);
		if (*signature == 's')
			at[4 + size] = 0;
	}
}

static void call(struct link *link, const char *interface, const char *member, const char *argument)
{
	message(link, CALL, "/org/freedesktop/DBus", interface, member, "org.freedesktop.DBus", argument ? "s" : "", argument,
		argument ? strlen(argument) : 0);
	stream_await(link, &link->returns, link->returns);
}

static size_t take(struct link *link, const char *from, size_t there)
{
	size_t header, whole;

	if (!link->is_authenticated) {
		const char *end = there ? memchr(from, '\n', there) : NULL;
		if (!end)
			return 0;
		if (strncmp(from, "OK ", 3))
			fail("the bus does not let us in: %.*s", (int)(end - from), from);
		link->is_authenticated = true;
		link->returns++;
		return end + 1 - from;
	}
	if (there < 16)
		return 0;
	header = aligned(16 + to_uint32(from + 12), 8);
	whole = header + to_uint32(from + 4);
	if (there < whole)
		return 0;
	if (from[1] == RETURN)
		link->returns++;
	else if (from[1] == ERROR)
		fail("the bus answers with an error: %.*s", whole - header > 4 ? (int)(whole - header - 4) : 0, from + header + 4);
	else if (from[1] == SIGNAL && link->has_subscribed)  /* before that, signals are the bus's own */
		arrived(from + header + 4, to_uint32(from + header));
	return whole;
}

static struct link *dbus_open(void)
{
	struct link *link = calloc(1, sizeof *link);
	char uid[16], hex[40] = "";

	if (!link)
		fail("no memory");
	stream_open(&link->stream, options.address, 0);
	snprintf(uid, sizeof uid, "%d", (int)getuid());
	for (int i = 0; uid[i]; i++)
		snprintf(hex + 2 * i, 3, "%02x", uid[i]);
	stream_put(&link->stream, "", 1);
	stream_text(&link->stream, "AUTH EXTERNAL ");
	stream_text(&link->stream, hex);
	stream_text(&link->stream, "\r\n");
	stream_await(link, &link->returns, 0);
	stream_text(&link->stream, "BEGIN\r\n");
	call(link, "org.freedesktop.DBus", "Hello", NULL);
	return link;
}

static void dbus_subscribe(struct link *link, const char *topic, enum scope scope)
{
	char rule[128];
	snprintf(rule, sizeof rule, "type='signal',%s='/%s'", scope == BELOW ? "path_namespace" : "path", topic);
	call(link, "org.freedesktop.DBus", "AddMatch", rule);
	link->has_subscribed = true;
}

static void dbus_publish(struct link *link, const char *topic, const void *payload, size_t size)
{
	char path[80];
	snprintf(path, sizeof path, "/%s", topic);
	message(link, SIGNAL, path, "bench.Load", "Message", NULL, "ay", payload, size);
}

static void dbus_settle(struct link *link)
{
	call(link, "org.freedesktop.DBus.Peer", "Ping", NULL);
}

const struct bus bus = {
	.open = dbus_open,
	.subscribe = dbus_subscribe,
	.publish = dbus_publish,
	.flush = stream_flush,
	.receive = stream_receive,
	.settle = dbus_settle,
};
