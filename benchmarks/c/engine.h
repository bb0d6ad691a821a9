/* What is between the load generator (engine.c) and a bus that it drives (sbus.c, redis.c, ...). */
#ifndef ENGINE_H
#define ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A topic is like a/b/c; each bus writes it down in its own way. */
enum scope {
	EXACT,    /* this topic */
	BELOW,    /* every topic that begins with it and a separator */
	PATTERN   /* as it is, in sbus's own language; for buses that speak it */
};

struct link;  /* one connection; each bus has its own */

/* How to speak to a kind of bus. What cannot be done is left out, and whatever fails ends the process. */
struct bus {
	bool deaf;  /* who has subscribed cannot publish on the same connection */
	struct link *(*open)(void);
	void (*close)(struct link *);
	void (*subscribe)(struct link *, const char *topic, enum scope);
	void (*unsubscribe)(struct link *, const char *topic, enum scope);
	void (*publish)(struct link *, const char *topic, const void *payload, size_t size);  /* at the next flush */
	void (*flush)(struct link *);
	bool (*receive)(struct link *);  /* one read; calls arrived() for each message. False: end, or nothing came */
	void (*settle)(struct link *);   /* returns when the server has dealt with all that was sent before */
};

extern const struct bus bus;

extern struct options {
	const char *address;
	size_t size;      /* bytes in a payload */
	int batch;        /* messages published between two flushes */
	bool bundles;     /* many messages in one packet, for buses that have both */
	bool senders;     /* subscribers ask who publishes, for buses that tell */
	double patience;  /* seconds after which nothing more is expected to come */
} options;

void arrived(const void *payload, size_t size);
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
double now(void);

/* Connect, again and again while the server is not there yet: to a path, or to a port on the loopback if not 0. */
int dial(int type, const char *path, int port);

#endif
