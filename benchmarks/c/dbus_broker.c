/* Starts dbus-broker on a machine without systemd.
 *
 *     dbus_broker SOCKET
 *
 * dbus-broker does not listen by itself: a controller hands it a listening socket, with a policy, over a connection of
 * its own. This process becomes the broker, so that its parent has its PID; a child of it is the controller,
 * and ends with it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <systemd/sd-bus.h>
#include <unistd.h>

/* What the policy is made of. A rule says: allowed or not, how important, for which names, paths, interfaces, members
 * and types, whether for broadcasts, with how many descriptors. A batch is rules for connecting, owning a name, sending
 * and receiving.
 */
#define RULES "a(btssssuutt)"
#define BATCH "bta(btbs)" RULES RULES
#define POLICY "a(u(" BATCH "))a(buu(" BATCH "))a(ss)bs"

static void must(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "dbus_broker: %s: %s\n", what, strerror(-result));
		exit(1);
	}
}

static void allow_all(sd_bus_message *message)
{
	must(sd_bus_message_open_container(message, 'a', "(btssssuutt)"), "rules");
	must(sd_bus_message_append(message, "(btssssuutt)", 1, UINT64_C(1), "", "", "", "", 0, 0, UINT64_C(0), UINT64_MAX),
	     "rule");
	must(sd_bus_message_close_container(message), "rules");
}

static void append_policy(sd_bus_message *message)
{
	must(sd_bus_message_open_container(message, 'v', "(" POLICY ")"), "policy");
	must(sd_bus_message_open_container(message, 'r', POLICY), "policy");
	must(sd_bus_message_open_container(message, 'a', "(u(" BATCH "))"), "users");
	must(sd_bus_message_open_container(message, 'r', "u(" BATCH ")"), "user");
	must(sd_bus_message_append(message, "u", UINT32_MAX), "every user");
	must(sd_bus_message_open_container(message, 'r', BATCH), "batch");
	must(sd_bus_message_append(message, "bt", 1, UINT64_C(1)), "connecting");
	must(sd_bus_message_append(message, "a(btbs)", 1, 1, UINT64_C(1), 1, ""), "names");
	allow_all(message);  /* sending */
	allow_all(message);  /* receiving */
	must(sd_bus_message_close_container(message), "batch");
	must(sd_bus_message_close_container(message), "user");
	must(sd_bus_message_close_container(message), "users");
	must(sd_bus_message_append(message, "a(buu(" BATCH "))", 0), "groups");
	must(sd_bus_message_append(message, "a(ss)bs", 0, 0, "session"), "the rest");
	must(sd_bus_message_close_container(message), "policy");
	must(sd_bus_message_close_container(message), "policy");
}

static void control(int connection, int listener)
{
	sd_bus *bus = NULL;
	sd_bus_message *message = NULL;
	sd_bus_error error = SD_BUS_ERROR_NULL;

	must(sd_bus_new(&bus), "a connection");
	must(sd_bus_set_fd(bus, connection, connection), "the connection");
	must(sd_bus_start(bus), "the start");
	must(sd_bus_message_new_method_call(bus, &message, NULL, "/org/bus1/DBus/Broker", "org.bus1.DBus.Broker",
					    "AddListener"),
	     "a call");
	must(sd_bus_message_append(message, "oh", "/org/bus1/DBus/Listener/0", listener), "the listener");
	append_policy(message);
	must(sd_bus_call(bus, message, 0, &error, NULL), error.message ? error.message : "AddListener");
	while (sd_bus_process(bus, NULL) >= 0 && sd_bus_wait(bus, UINT64_MAX) >= 0)
		;
}

int main(int argc, char **argv)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0), ends[2];
	char number[16];

	if (argc != 2 || strlen(argv[1]) >= sizeof address.sun_path)
		return 2;
	strcpy(address.sun_path, argv[1]);
	if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, SOMAXCONN) ||
	    socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends)) {
		perror(argv[1]);
		return 1;
	}
	switch (fork()) {
	case -1:
		perror("fork");
		return 1;
	case 0:
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ends[0]);
		control(ends[1], listener);
		return 0;
	}
	close(listener);
	close(ends[1]);
	snprintf(number, sizeof number, "%d", ends[0]);
	/* Nothing is to be lost for want of room. */
	execlp("dbus-broker", "dbus-broker", "--controller", number, "--machine-id", "00000000000000000000000000000001",
	       "--max-bytes", "100000000000", "--max-fds", "1000000", "--max-matches", "1000000", "--max-objects", "1000000",
	       NULL);
	perror("dbus-broker");
	return 1;
}
