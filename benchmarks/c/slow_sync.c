/* Makes fsync(2) and fdatasync(2) take SLOW_SYNC_US microseconds more, for a program that is started with this library
 * in LD_PRELOAD: the disk of a virtual machine may confirm a sync long before its data are anywhere safe. */
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void wait_longer(void)
{
    const char *text = getenv("SLOW_SYNC_US");
    long microseconds = text ? atol(text) : 0;
    struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000};

    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

int fsync(int fd)
{
    wait_longer();
    return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    wait_longer();
    return (int)syscall(SYS_fdatasync, fd);
}
