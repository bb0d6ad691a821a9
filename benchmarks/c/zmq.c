/* ZeroMQ, for the load generator. It has no server of its own: this program is that too.
 *
 *     zmq serve PATH     an XSUB/XPUB proxy: publishers connect to PATH.in, subscribers to PATH.out
 *     zmq version
 *
 * A message is one frame, TOPIC NUL PAYLOAD. libzmq gathers messages by itself, in a thread of its own, so that flush
 * has nothing to do and a batch means nothing.
 */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

struct link {
	void *subscriber;
	long probes;  /* messages to ourselves that came back */
};

static void *context, *publisher;  /* one of each in a process */
static pid_t owner;

static void *connected(int type, const char *end, bool listen)
{
	char address[256];
	int none = 0, patience = (int)(options.patience * 1e3);
	void *made;

	if (owner != getpid()) {  /* they do not survive a fork */
		owner = getpid();
		publisher = NULL;
		context = zmq_ctx_new();
		zmq_ctx_set(context, ZMQ_MAX_SOCKETS, 8192);
	}
	if (!(made = zmq_socket(context, type)))
		fail("no socket: %s", zmq_strerror(zmq_errno()));
	zmq_setsockopt(made, ZMQ_SNDHWM, &none, sizeof none);  /* no limit: nothing is dropped */
	zmq_setsockopt(made, ZMQ_RCVHWM, &none, sizeof none);
	if (!listen)
		zmq_setsockopt(made, ZMQ_RCVTIMEO, &patience, sizeof patience);
	snprintf(address, sizeof address, "ipc://%s%s", options.address, end);
	if (listen ? zmq_bind(made, address) : zmq_connect(made, address))
		fail("%s: %s", address, zmq_strerror(zmq_errno()));
	return made;
}

static struct link *open_link(void)
{
	struct link *link = calloc(1, sizeof *link);
	if (!link)
		fail("no memory");
	link->subscriber = connected(ZMQ_SUB, ".out", false);
	if (!publisher)
		publisher = connected(ZMQ_PUB, ".in", false);
	return link;
}

static void subscribe(struct link *link, const char *topic, enum scope scope)
{
	char prefix[80];
	int size = snprintf(prefix, sizeof prefix, "%s%s", topic, scope == BELOW ? "/" : "");
	zmq_setsockopt(link->subscriber, ZMQ_SUBSCRIBE, prefix, size + (scope == BELOW ? 0 : 1));
}

static void publish(struct link *link, const char *topic, const void *payload, size_t size)
{
	size_t key = strlen(topic) + 1;
	zmq_msg_t message;
	(void)link;

	zmq_msg_init_size(&message, key + size);
	memcpy(zmq_msg_data(&message), topic, key);
	memcpy((char *)zmq_msg_data(&message) + key, payload, size);
	if (zmq_msg_send(&message, publisher, 0) < 0)
		fail("cannot send: %s", zmq_strerror(zmq_errno()));
}

static void flush(struct link *link)
{
	(void)link;
}

static bool take(struct link *link, int flags)
{
	zmq_msg_t message;
	const char *frame, *nul;
	size_t size;
	bool came;

	zmq_msg_init(&message);
	came = zmq_msg_recv(&message, link->subscriber, flags) >= 0;
	if (came) {
		frame = zmq_msg_data(&message);
		size = zmq_msg_size(&message);
		nul = memchr(frame, 0, size);
		if (!strncmp(frame, "probe/", 6))
			link->probes++;
		else
			arrived(nul + 1, frame + size - (nul + 1));
	}
	zmq_msg_close(&message);
	return came;
}

static bool receive(struct link *link)
{
	if (!take(link, 0))
		return false;
	while (take(link, ZMQ_DONTWAIT))
		;
	return true;
}

/* A subscription travels on its own, so publish to ourselves until something comes. It went last: the others are there
 * by then.
 */
static void settle(struct link *link)
{
	static int serial;
	char topic[64];
	long before = link->probes;
	zmq_pollitem_t answer = {.socket = link->subscriber, .events = ZMQ_POLLIN};

	snprintf(topic, sizeof topic, "probe/%d/%d", getpid(), serial++);
	subscribe(link, topic, EXACT);
	for (int tries = 0; link->probes == before; tries++) {
		if (tries == 5000)
			fail("no answer from the server");
		publish(link, topic, "", 0);
		if (zmq_poll(&answer, 1, 1) > 0)
			take(link, 0);
	}
	zmq_setsockopt(link->subscriber, ZMQ_UNSUBSCRIBE, topic, strlen(topic) + 1);
	while (zmq_poll(&answer, 1, 0) > 0 && take(link, ZMQ_DONTWAIT))
		;
}

const struct bus bus = {
	.open = open_link,
	.subscribe = subscribe,
	.publish = publish,
	.flush = flush,
	.receive = receive,
	.settle = settle,
};

/* Before main(), which knows nothing of servers. */
__attribute__((constructor)) static void serve(int argc, char **argv)
{
	int major, minor, patch;

	if (argc == 2 && !strcmp(argv[1], "version")) {
		zmq_version(&major, &minor, &patch);
		printf("libzmq %d.%d.%d\n", major, minor, patch);
		exit(0);
	}
	if (argc == 3 && !strcmp(argv[1], "serve")) {
		void *in, *out;
		options.address = argv[2];
		in = connected(ZMQ_XSUB, ".in", true);
		out = connected(ZMQ_XPUB, ".out", true);
		exit(zmq_proxy(in, out, NULL) != 0);
	}
}
