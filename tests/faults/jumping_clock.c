/* A wall clock that jumps: every call says a day more or a day less than the call before, in turns, and drifts on.
 * Loaded before libc (LD_PRELOAD); clocks that only go forward are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>

static atomic_long calls;

static long jump(void) {
    long call = atomic_fetch_add(&calls, 1);
    return (call % 2 ? 86400 : -86400) + call % 7 * 3600;
}

static int is_wall(clockid_t id) {
    return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI;
}

int clock_gettime(clockid_t id, struct timespec *said) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, said);
    if (!code && is_wall(id)) said->tv_sec += jump();
    return code;
}

int gettimeofday(struct timeval *restrict said, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(said, zone);
    if (!code && said) said->tv_sec += jump();
    return code;
}

time_t time(time_t *said) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (said) *said = now.tv_sec;
    return now.tv_sec;
}
