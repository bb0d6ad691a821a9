/* The load generator, without the bus: who publishes what to whom, how it is checked and what is counted.
 *
 *     generator MODE ADDRESS [NAME=VALUE...]
 *
 * Each bus has a file that speaks its language (engine.h); the two together are one program. It prints one line, a JSON
 * object. Every process of it has an alarm clock and ends when its parent does.
 *
 *     wait    until a client is served; prints when that was (CLOCK_MONOTONIC)
 *     flow    `publishers` publish for `seconds`, or `limit` messages each; `subscribers` must get them all in order.
 *             `users`: the publishers belong to so many users in turn, for which this has to be root
 *             Beside them, if asked for: idle clients (`idle`) with `patterns` patterns between them, a client that
 *             comes and goes or subscribes and unsubscribes (`churn` 1 or 2, `rate` times a second), and a pair of
 *             clients that send each other a message back and forth (`pair` 1; `first` 1: on its CPU it goes before all
 *             others, so that what is measured is the server and not the scheduler)
 *     trip    a client sends a message to itself and waits for it, for `seconds`
 *     sparse  `publishers` connections publish `rate` messages a second in all, at random times, to one subscriber
 *     hold    `idle` clients connect; prints that, and keeps them until its input ends
 *     stall   a client publishes `limit` messages to one that reads none; prints that, and waits until its input ends
 *
 * `server` is the PID of the server whose CPU time is measured. `bundles` 1: the clients ask for many messages in one
 * packet, if their bus knows that. `senders` 1: subscribers ask who publishes. The rest is in struct settings.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <arpa/inet.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1024, MOST_TIMES = 1 << 18, LOOK_AT_CLOCK = 16, CHURN_COMES_AND_GOES = 1, CHURN_SUBSCRIBES = 2, FIRST_USER = 20000 };

struct options options = {.size = 64, .batch = 1, .patience = 5};

static struct settings {
	double publishers, subscribers, size, batch, seconds, limit, keys, idle, patterns, churn, pair, first, rate, server;
	double users;
	double bundles, senders, patience, deadline;
} settings = {
	.publishers = 1, .subscribers = 1, .size = 64, .batch = 1, .seconds = 1, .limit = 1e9, .keys = 1, .patterns = -1,
	.patience = 5, .deadline = 60,
};

#define SETTING(name) {#name, &settings.name}
static const struct {
	const char *name;
	double *value;
} names[] = {
	SETTING(publishers), SETTING(subscribers), SETTING(size), SETTING(batch), SETTING(seconds), SETTING(limit),
	SETTING(keys), SETTING(idle), SETTING(patterns), SETTING(churn), SETTING(pair), SETTING(first), SETTING(rate),
	SETTING(server), SETTING(users), SETTING(bundles), SETTING(senders), SETTING(patience), SETTING(deadline),
};

/* What every payload begins with; the rest of it is filler. */
struct stamp {
	uint64_t number;
	uint32_t publisher;
	uint32_t is_last;  /* not a message, but the word that there are no more; `number` says how many there were */
	double sent;       /* the time, if the subscriber measures it */
};

/* What the processes tell each other. */
static struct shared {
	pthread_barrier_t crowd, subscribed, ready, go;
	atomic_int publishing;        /* publishers that have not finished */
	atomic_long churned;
	atomic_long times;            /* how many of them were taken */
	double published_until;
	long published[MOST];
	struct count {
		long got, wrong;
		double last;
	} received[MOST];
	double late;                  /* seconds that a message was sent after its time, at most */
	float time_us[MOST_TIMES];
} *shared;

static pid_t parent;

/* --- the ground ------------------------------------------------------------------------------ */

double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

void fail(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	if (getpid() != parent)
		kill(parent, SIGUSR1);
	_exit(2);
}

static void a_child_failed(int number)
{
	(void)number;
	_exit(2);  /* the others go with us */
}

int dial(int type, const char *path, int port)
{
	struct sockaddr_un local = {.sun_family = AF_UNIX};
	struct sockaddr_in loopback = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	struct timeval patience = {.tv_sec = (time_t)options.patience, .tv_usec = (long)(fmod(options.patience, 1) * 1e6)};
	const struct timespec pause = {.tv_nsec = 500000};
	double give_up = now() + options.patience;
	int one = 1;

	if (strlen(path) >= sizeof local.sun_path)
		fail("the address is too long: %s", path);
	strcpy(local.sun_path, path);
	for (;;) {
		int fd = socket(port ? AF_INET : AF_UNIX, type | SOCK_CLOEXEC, 0);
		if (fd < 0)
			fail("no socket: %s", strerror(errno));
		if (!connect(fd, port ? (void *)&loopback : (void *)&local, port ? sizeof loopback : sizeof local)) {
			if (port)
				setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
			setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
			return fd;
		}
		if (now() > give_up)
			fail("cannot connect to %s: %s", options.address, strerror(errno));
		close(fd);
		nanosleep(&pause, NULL);
	}
}

static double server_cpu(void)  /* seconds, of all its threads */
{
	clockid_t clock;
	struct timespec t;
	if (!settings.server || clock_getcpuclockid((pid_t)settings.server, &clock) || clock_gettime(clock, &t))
		return 0;
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static void stay_in_bounds(void)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm((unsigned)settings.deadline);
}

static pid_t begin(void (*role)(int), int which)
{
	pid_t pid = fork();
	if (pid < 0)
		fail("no process: %s", strerror(errno));
	if (!pid) {
		stay_in_bounds();
		role(which);
		_exit(0);
	}
	return pid;
}

static void until_input_ends(void)
{
	char byte;
	fflush(stdout);
	while (read(0, &byte, 1) > 0)
		;
}

static void sleep_until(double when)
{
	struct timespec t = {.tv_sec = (time_t)when, .tv_nsec = (long)((when - (time_t)when) * 1e9)};
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
		;
}

static void took(double seconds)
{
	long place = atomic_fetch_add(&shared->times, 1);
	if (place < MOST_TIMES)
		shared->time_us[place] = (float)(seconds * 1e6);
}

/* --- what arrives ---------------------------------------------------------------------------- */

static struct count mine;
static uint64_t expected[MOST];
static int ended;
static bool timed;

void arrived(const void *payload, size_t size)
{
	struct stamp stamp;

	if (size != options.size) {
		mine.wrong++;
		return;
	}
	memcpy(&stamp, payload, sizeof stamp);
	if (stamp.publisher >= MOST || stamp.number < expected[stamp.publisher]) {  /* of no publisher; or repeated, or too late */
		mine.wrong++;
		return;
	}
	expected[stamp.publisher] = stamp.number + 1;
	if (stamp.is_last) {
		ended++;
		return;
	}
	mine.got++;
	if (timed)
		took(now() - stamp.sent);
}

static void *filled(void)
{
	void *payload = malloc(options.size);
	if (!payload)
		fail("no memory");
	memset(payload, 'x', options.size);
	return payload;
}

static void publish(struct link *link, const char *topic, void *payload, struct stamp stamp)
{
	memcpy(payload, &stamp, sizeof stamp);
	bus.publish(link, topic, payload, options.size);
}

/* Send one message, and return when it has come. */
static void pass(struct link *from, struct link *to, const char *topic, void *payload, int publisher)
{
	long before = mine.got;
	publish(from, topic, payload, (struct stamp){.number = expected[publisher], .publisher = publisher});
	bus.flush(from);
	while (mine.got == before)
		if (!bus.receive(to))
			fail("a message is lost, or the server is gone");
}

/* --- the roles ------------------------------------------------------------------------------- */

static void open_idle(void)
{
	int clients = (int)settings.idle;
	long patterns = settings.patterns < 0 ? clients : (long)settings.patterns;
	char topic[64];

	for (int c = 0; c < clients; c++) {
		struct link *link = bus.open();
		if (settings.patterns < 0) {
			snprintf(topic, sizeof topic, "idle/%d", c);
			bus.subscribe(link, topic, EXACT);
		}
		/* In the tree of the keys that are used, and near misses all of them. */
		for (long i = c; settings.patterns >= 0 && i < patterns; i += clients) {
			static const char *const shapes[] = {"flow/idle%ld", "flow/*/idle%ld", "idle/%ld/", "flow/x%ld*"};
			snprintf(topic, sizeof topic, shapes[i / clients % 4], i);
			bus.subscribe(link, topic, PATTERN);
		}
		bus.settle(link);
	}
}

static void crowd(int unused)
{
	(void)unused;
	open_idle();
	pthread_barrier_wait(&shared->crowd);
	pause();
}

static void subscriber(int me)
{
	struct link *link = bus.open();

	bus.subscribe(link, "flow", BELOW);
	bus.settle(link);
	mine = (struct count){0};
	pthread_barrier_wait(&shared->subscribed);
	pthread_barrier_wait(&shared->ready);
	while (ended < (int)settings.publishers && bus.receive(link))
		mine.last = now();
	shared->received[me] = mine;
}

static void topic_of(char topic[64], int publisher, long key)
{
	snprintf(topic, 64, "flow/%d/%ld", publisher, key);
}

static void say_last(struct link *link, const char *topic, void *payload, int publisher, long published)
{
	/* Before it is sent: once the subscribers have it, the parent adds up. */
	shared->published[publisher] = published;
	publish(link, topic, payload, (struct stamp){.number = published, .publisher = publisher, .is_last = 1});
	bus.flush(link);
}

/* Connect as one of the users. The server sees the effective user; for the path of the socket it is still root. */
static struct link *open_as(int me)
{
	struct link *link;

	if (!settings.users)
		return bus.open();
	if (setresuid(-1, FIRST_USER + me % (int)settings.users, -1))
		fail("only root can connect as other users: %s", strerror(errno));
	setfsuid(0);
	link = bus.open();
	if (setresuid(-1, 0, -1))
		fail("cannot be root again: %s", strerror(errno));
	prctl(PR_SET_PDEATHSIG, SIGKILL);  /* another user's process would not end with its parent */
	return link;
}

static void publisher(int me)
{
	long limit = (long)settings.limit, keys = (long)settings.keys, sent = 0, look = 0;
	void *payload = filled();
	char topic[64];
	struct link *link;
	double stop;

	pthread_barrier_wait(&shared->subscribed);
	link = open_as(me);
	bus.settle(link);
	topic_of(topic, me, 0);
	pthread_barrier_wait(&shared->ready);
	pthread_barrier_wait(&shared->go);
	stop = now() + settings.seconds;
	while (sent < limit) {
		for (int i = 0; i < options.batch && sent < limit; i++, sent++) {
			if (keys > 1)
				topic_of(topic, me, sent % keys);
			publish(link, topic, payload, (struct stamp){.number = sent, .publisher = me});
		}
		bus.flush(link);
		if (sent >= look) {
			if (now() >= stop)
				break;
			look = sent + LOOK_AT_CLOCK;
		}
	}
	say_last(link, topic, payload, me, sent);
	if (atomic_fetch_sub(&shared->publishing, 1) == 1)
		shared->published_until = now();
	bus.settle(link);
}

static void churner(int unused)
{
	struct link *link = settings.churn == CHURN_SUBSCRIBES ? bus.open() : NULL;
	double next;
	(void)unused;

	prctl(PR_SET_TIMERSLACK, 1);
	pthread_barrier_wait(&shared->ready);
	pthread_barrier_wait(&shared->go);
	next = now();
	for (long i = 0; atomic_load(&shared->publishing); i++) {
		/* As one that waits for answers does; the last could match what is published to others. */
		static const char *const shapes[] = {"inbox/%ld", "inbox/%ld/", "flow/inbox%ld", "flow/*/inbox%ld"};
		char topic[64];
		snprintf(topic, sizeof topic, shapes[i % 4], i);
		if (settings.churn == CHURN_SUBSCRIBES) {
			bus.subscribe(link, topic, PATTERN);
			bus.unsubscribe(link, topic, PATTERN);
		} else {
			link = bus.open();
			bus.subscribe(link, topic, PATTERN);
			bus.close(link);
		}
		atomic_fetch_add(&shared->churned, 1);
		sleep_until(next += 1 / settings.rate);
	}
}

static void pair(int unused)
{
	struct link *one = bus.open(), *other = bus.open();
	void *payload = filled();
	struct sched_param priority = {.sched_priority = 1};
	(void)unused;

	if (settings.first && sched_setscheduler(0, SCHED_FIFO, &priority))
		fail("no priority: %s", strerror(errno));
	bus.subscribe(one, "pair/one", EXACT);
	bus.subscribe(other, "pair/other", EXACT);
	bus.settle(one);
	bus.settle(other);
	pthread_barrier_wait(&shared->ready);
	pthread_barrier_wait(&shared->go);
	while (atomic_load(&shared->publishing)) {
		double start = now();
		pass(one, other, "pair/other", payload, 0);
		pass(other, one, "pair/one", payload, 1);
		took(now() - start);
	}
}

static double evenly_random(void)  /* above 0, at most 1; always the same series */
{
	static uint64_t state = 88172645463325252u;
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return ((state >> 11) + 1) * 0x1p-53;
}

static void sparse_publishers(int unused)
{
	int count = (int)settings.publishers;
	struct link **links = calloc(count, sizeof *links);
	long *published = calloc(count, sizeof *published);
	void *payload = filled();
	char topic[64];
	double next, stop, sent;
	(void)unused;

	prctl(PR_SET_TIMERSLACK, 1);
	pthread_barrier_wait(&shared->subscribed);
	for (int i = 0; i < count; i++) {
		links[i] = bus.open();
		bus.settle(links[i]);
	}
	pthread_barrier_wait(&shared->ready);
	pthread_barrier_wait(&shared->go);
	next = now();
	for (stop = next + settings.seconds; next < stop; next += -log(evenly_random()) / settings.rate) {
		int who = (int)(evenly_random() * count) % count;
		sleep_until(next);
		topic_of(topic, who, 0);
		sent = now();
		publish(links[who], topic, payload, (struct stamp){.number = published[who]++, .publisher = who, .sent = sent});
		bus.flush(links[who]);
		if (sent - next > shared->late)
			shared->late = sent - next;
	}
	shared->published_until = now();
	for (int i = 0; i < count; i++) {
		topic_of(topic, i, 0);
		say_last(links[i], topic, payload, i, published[i]);
	}
}

static void sparse_subscriber(int me)
{
	timed = true;
	subscriber(me);
}

/* --- the modes ------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
	float x = *(const float *)a, y = *(const float *)b;
	return (x > y) - (x < y);
}

/* The times that were taken, as quantiles: 0, 1, ... 99 %, then 99.5, 99.9 and 100 %. */
static void print_times(void)
{
	long count = atomic_load(&shared->times);
	if (count > MOST_TIMES)
		count = MOST_TIMES;
	if (!count)
		return;
	qsort(shared->time_us, count, sizeof *shared->time_us, compare);
	printf(", \"times\": %ld, \"times_us\": [", count);
	for (int i = 0; i < 100; i++)
		printf("%.2f, ", shared->time_us[count * i / 100]);
	printf("%.2f, %.2f, %.2f]", shared->time_us[count * 995 / 1000], shared->time_us[count * 999 / 1000],
	       shared->time_us[count - 1]);
}

static void wait_for(pid_t pid)
{
	int status;
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	if (status)
		fail("a part of the generator failed, or took too long");
}

static void flow(bool sparse)
{
	int publishers = sparse ? 1 : (int)settings.publishers, subscribers = sparse ? 1 : (int)settings.subscribers;
	int helpers = (settings.churn ? 1 : 0) + (settings.pair ? 1 : 0);
	pid_t receiving[MOST];
	double start, cpu, end = 0;
	long published = 0, got = 0, wrong = 0;

	pthread_barrierattr_t among_processes;
	pthread_barrierattr_init(&among_processes);
	pthread_barrierattr_setpshared(&among_processes, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&shared->crowd, &among_processes, 2);
	pthread_barrier_init(&shared->subscribed, &among_processes, publishers + subscribers);
	pthread_barrier_init(&shared->ready, &among_processes, publishers + subscribers + helpers + 1);
	pthread_barrier_init(&shared->go, &among_processes, publishers + helpers + 1);
	atomic_store(&shared->publishing, publishers);

	if (settings.idle) {
		begin(crowd, 0);
		pthread_barrier_wait(&shared->crowd);
	}
	for (int i = 0; i < subscribers; i++)
		receiving[i] = begin(sparse ? sparse_subscriber : subscriber, i);
	for (int i = 0; i < publishers; i++)
		begin(sparse ? sparse_publishers : publisher, i);
	if (settings.churn)
		begin(churner, 0);
	if (settings.pair)
		begin(pair, 0);
	pthread_barrier_wait(&shared->ready);
	cpu = server_cpu();
	start = now();
	pthread_barrier_wait(&shared->go);
	for (int i = 0; i < subscribers; i++)
		wait_for(receiving[i]);
	cpu = server_cpu() - cpu;

	for (int i = 0; i < (int)settings.publishers; i++)
		published += shared->published[i];
	for (int i = 0; i < subscribers; i++) {
		got += shared->received[i].got;
		wrong += shared->received[i].wrong;
		if (shared->received[i].last > end)
			end = shared->received[i].last;
	}
	printf("{\"published\": %ld, \"delivered\": %ld, \"lost\": %ld, \"wrong\": %ld, \"seconds\": %.6f, "
	       "\"published_seconds\": %.6f, \"cpu_seconds\": %.6f, \"churned\": %ld, \"late_seconds\": %.6f",
	       published, got, published * subscribers - got, wrong, end - start, shared->published_until - start, cpu,
	       atomic_load(&shared->churned), shared->late);
	print_times();
	printf("}\n");
}

static void trip(void)
{
	struct link *to = bus.open(), *from = bus.deaf ? bus.open() : to;
	void *payload = filled();
	double start, stop, cpu;
	long trips = 0;

	bus.subscribe(to, "trip/me", EXACT);
	bus.settle(to);
	if (from != to)
		bus.settle(from);
	for (int i = 0; i < 200; i++)
		pass(from, to, "trip/me", payload, 0);
	cpu = server_cpu();
	start = now();
	for (stop = start + settings.seconds; now() < stop && trips < (long)settings.limit; trips++) {
		double sent = now();
		pass(from, to, "trip/me", payload, 0);
		took(now() - sent);
	}
	if (mine.wrong)
		fail("%ld messages were wrong", mine.wrong);
	printf("{\"delivered\": %ld, \"lost\": 0, \"wrong\": 0, \"seconds\": %.6f, \"cpu_seconds\": %.6f", trips,
	       now() - start, server_cpu() - cpu);
	print_times();
	printf("}\n");
}

static void stall(void)
{
	struct link *reader = bus.open(), *writer = bus.open();
	void *payload = filled();

	bus.subscribe(reader, "flow", BELOW);
	bus.settle(reader);
	for (long i = 0; i < (long)settings.limit; i++) {
		publish(writer, "flow/0/0", payload, (struct stamp){.number = i});
		if ((i + 1) % options.batch == 0)
			bus.flush(writer);
	}
	bus.flush(writer);
	bus.settle(writer);
	printf("{\"published\": %ld}\n", (long)settings.limit);
	until_input_ends();
}

int main(int argc, char **argv)
{
	const char *mode = argc > 2 ? argv[1] : "";

	parent = getpid();
	signal(SIGPIPE, SIG_IGN);
	signal(SIGUSR1, a_child_failed);
	for (int i = 3; i < argc; i++) {
		char *equals = strchr(argv[i], '=');
		size_t n = 0, count = sizeof names / sizeof *names;
		if (equals)
			*equals = 0;
		while (equals && n < count && strcmp(names[n].name, argv[i]))
			n++;
		if (!equals || n == count)
			fail("what is %s?", argv[i]);
		*names[n].value = atof(equals + 1);
	}
	if (argc > 2)
		options.address = argv[2];
	options.size = (size_t)settings.size;
	options.batch = (int)settings.batch;
	options.bundles = settings.bundles != 0;
	options.senders = settings.senders != 0;
	options.patience = settings.patience;
	if (settings.publishers < 1 || settings.publishers > MOST || settings.subscribers < 1 || settings.subscribers > MOST ||
	    options.size < sizeof(struct stamp) || options.batch < 1)
		fail("at most %d publishers and subscribers, at least %zu bytes", MOST, sizeof(struct stamp));
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		fail("no memory");
	stay_in_bounds();

	if (!strcmp(mode, "wait")) {
		struct link *link = bus.open();
		bus.settle(link);
		printf("{\"served\": %.6f}\n", now());
	} else if (!strcmp(mode, "flow")) {
		flow(false);
	} else if (!strcmp(mode, "sparse")) {
		flow(true);
	} else if (!strcmp(mode, "trip")) {
		trip();
	} else if (!strcmp(mode, "hold")) {
		open_idle();
		printf("{\"held\": %d}\n", (int)settings.idle);
		until_input_ends();
	} else if (!strcmp(mode, "stall")) {
		stall();
	} else {
		fail("usage: %s wait|flow|trip|sparse|hold|stall ADDRESS [NAME=VALUE...]", argv[0]);
	}
	fflush(stdout);
	_exit(0);
}
