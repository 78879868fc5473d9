/* A wall clock that is wrong: preloaded, it moves what programs read of the real time. The monotonic clock stays.
 *
 *   FAULTS_CLOCK    seconds:milliseconds - so much is added to the time, from so long after the start on
 *
 * Only what is read moves; waits by the kernel's own real-time clock do not, so programs with such waits are none for this.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long added_s, from_ms;

static long long monotonic_ms(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

__attribute__((constructor)) void clock_reload(void) {
    const char *asked = getenv("FAULTS_CLOCK"), *after = asked ? strchr(asked, ':') : NULL;
    added_s = asked ? atoll(asked) : 0;
    from_ms = monotonic_ms() + (after ? atoll(after + 1) : 0);
}

static time_t moved(time_t seconds) { return added_s && monotonic_ms() >= from_ms ? seconds + added_s : seconds; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec = moved(now->tv_sec);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec at;
    int failed = clock_gettime(CLOCK_REALTIME, &at);
    if (!failed) *now = (struct timeval){at.tv_sec, at.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *seconds) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (seconds) *seconds = at.tv_sec;
    return at.tv_sec;
}
