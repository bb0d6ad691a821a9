/* The kernel's own limit: what SEQPACKET socket pairs do with no server between their ends.
 *
 *     kernel flow|trip - [NAME=VALUE...]
 *
 * It takes the words of the load generator (engine.c) and prints what that prints, so that both fit into one table.
 * A message passes through the kernel once here, and twice on its way through a server. `publishers` processes write
 * to each of `subscribers` processes; nothing is checked but that all packets come.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 128, BATCH = 64, MOST_TIMES = 1 << 18 };

static struct {
	const char *name;
	double value;
} settings[] = {
	{"publishers", 1}, {"subscribers", 1}, {"size", 64}, {"batch", 1}, {"seconds", 1}, {"limit", 1e9},
	{"server", 0}, {"patience", 0}, {"deadline", 60},
};

static struct shared {
	long written[MOST], read[MOST];
	double last[MOST];
} *shared;

static double setting(const char *name)
{
	for (size_t i = 0;; i++)
		if (!strcmp(settings[i].name, name))
			return settings[i].value;
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		_exit(2);
	}
}

static struct mmsghdr packets[BATCH];
static struct iovec at[BATCH];

static void prepare(size_t size)
{
	for (int i = 0; i < BATCH; i++) {
		at[i] = (struct iovec){.iov_base = calloc(1, size), .iov_len = size};
		must(at[i].iov_base != NULL, "memory");
		packets[i].msg_hdr = (struct msghdr){.msg_iov = &at[i], .msg_iovlen = 1};
	}
}

static void put(int fd, int count)
{
	if (count == 1) {
		must(send(fd, at->iov_base, at->iov_len, MSG_NOSIGNAL) > 0, "send");
		return;
	}
	for (int sent = 0, more; sent < count; sent += more)
		must((more = sendmmsg(fd, packets + sent, count - sent, MSG_NOSIGNAL)) > 0, "sendmmsg");
}

static void writer(int me, int (*ends)[2], int readers)
{
	int batch = (int)setting("batch");
	long sent = 0, limit = (long)setting("limit");
	double stop = now() + setting("seconds");

	while (sent < limit && (sent % 16 >= batch || now() < stop)) {
		for (int r = 0; r < readers; r++)
			put(ends[r][0], batch);
		sent += batch;
	}
	shared->written[me] = sent;
}

static void reader(int me, int fd)
{
	int count;
	long got = 0;
	while ((count = recvmmsg(fd, packets, BATCH, MSG_WAITFORONE, NULL)) > 0) {
		int i = 0;
		while (i < count && packets[i].msg_len)
			i++;
		got += i;
		shared->last[me] = now();
		if (i < count)
			break;  /* all writers have closed */
	}
	shared->read[me] = got;
}

static void flow(void)
{
	int writers = (int)setting("publishers"), readers = (int)setting("subscribers"), status, failed = 0;
	int ends[MOST][2];
	double start, end = 0;
	long written = 0, got = 0;

	for (int r = 0; r < readers; r++)
		must(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends[r]), "socketpair");
	start = now();
	for (int i = 0; i < writers + readers; i++) {
		pid_t child = fork();
		must(child >= 0, "fork");
		if (child)
			continue;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		alarm((unsigned)setting("deadline"));
		if (i < readers) {
			int mine = ends[i][1];
			for (int r = 0; r < readers; r++) {
				close(ends[r][0]);
				if (r != i)
					close(ends[r][1]);
			}
			reader(i, mine);
		} else {
			writer(i - readers, ends, readers);
		}
		_exit(0);
	}
	for (int r = 0; r < readers; r++) {
		close(ends[r][0]);
		close(ends[r][1]);
	}
	while (wait(&status) > 0 || errno == EINTR)
		failed |= status;
	must(!failed, "a part of it");
	for (int w = 0; w < writers; w++)
		written += shared->written[w];
	for (int r = 0; r < readers; r++) {
		got += shared->read[r];
		if (shared->last[r] > end)
			end = shared->last[r];
	}
	printf("{\"published\": %ld, \"delivered\": %ld, \"lost\": %ld, \"wrong\": 0, \"seconds\": %.6f, "
	       "\"cpu_seconds\": 0}\n",
	       written, got, written * readers - got, end - start);
}

static int compare(const void *a, const void *b)
{
	float x = *(const float *)a, y = *(const float *)b;
	return (x > y) - (x < y);
}

static void trip(void)
{
	static float times[MOST_TIMES];
	int ends[2];
	long trips = 0;
	double start, stop, sent;
	pid_t child;

	must(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), "socketpair");
	must((child = fork()) >= 0, "fork");
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ends[0]);
		for (;;) {
			ssize_t size = recv(ends[1], at->iov_base, at->iov_len, 0);
			if (size <= 0 || send(ends[1], at->iov_base, size, MSG_NOSIGNAL) != size)
				_exit(0);
		}
	}
	start = now();
	for (stop = start + setting("seconds"); now() < stop && trips < MOST_TIMES; trips++) {
		sent = now();
		put(ends[0], 1);
		must(recv(ends[0], at->iov_base, at->iov_len, 0) > 0, "recv");
		times[trips] = (float)((now() - sent) * 1e6);
	}
	must(trips > 0, "a round trip");
	qsort(times, trips, sizeof *times, compare);
	printf("{\"delivered\": %ld, \"lost\": 0, \"wrong\": 0, \"seconds\": %.6f, \"cpu_seconds\": 0, \"times\": %ld, "
	       "\"times_us\": [",
	       trips, now() - start, trips);
	for (int i = 0; i < 100; i++)
		printf("%.2f, ", times[trips * i / 100]);
	printf("%.2f, %.2f, %.2f]}\n", times[trips * 995 / 1000], times[trips * 999 / 1000], times[trips - 1]);
}

int main(int argc, char **argv)
{
	for (int i = 3; i < argc; i++) {
		char *equals = strchr(argv[i], '=');
		size_t n = 0, count = sizeof settings / sizeof *settings;
		if (equals)
			*equals = 0;
		while (equals && n < count && strcmp(settings[n].name, argv[i]))
			n++;
		if (!equals || n == count) {
			fprintf(stderr, "what is %s?\n", argv[i]);
			return 2;
		}
		settings[n].value = atof(equals + 1);
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm((unsigned)setting("deadline"));
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(shared != MAP_FAILED, "memory");
	must(setting("publishers") <= MOST && setting("subscribers") <= MOST && setting("batch") <= BATCH, "the number");
	prepare((size_t)setting("size"));
	if (argc > 1 && !strcmp(argv[1], "flow")) {
		flow();
	} else if (argc > 1 && !strcmp(argv[1], "trip")) {
		trip();
	} else {
		fprintf(stderr, "usage: %s flow|trip - [NAME=VALUE...]\n", argv[0]);
		return 2;
	}
	return 0;
}
