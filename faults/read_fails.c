/* Reading fails: preload this library (LD_PRELOAD), and in each process READ_FAILS readings of files whose path ends in
 * READ_FAILS_AT end with an input/output error: the first ones, or those behind the first READ_FAILS_BEHIND.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int first, left;
static const char *end;

__attribute__((constructor)) static void begin(void) {
    left = getenv("READ_FAILS") ? atoi(getenv("READ_FAILS")) : 0;
    first = getenv("READ_FAILS_BEHIND") ? atoi(getenv("READ_FAILS_BEHIND")) : 0;
    end = getenv("READ_FAILS_AT");
}

static int fails(int fd) {
    char link[64], path[PATH_MAX];
    if (!end || __atomic_load_n(&left, __ATOMIC_SEQ_CST) <= 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1), tail = strlen(end);
    if (length < tail || strncmp(path + length - tail, end, tail)) return 0;
    if (__atomic_fetch_sub(&first, 1, __ATOMIC_SEQ_CST) > 0) return 0;
    if (__atomic_fetch_sub(&left, 1, __ATOMIC_SEQ_CST) <= 0) return 0;
    errno = EIO;
    return 1;
}

#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
ssize_t read(int fd, void *data, size_t size) { return fails(fd) ? -1 : NEXT(read)(fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { return fails(fd) ? -1 : NEXT(pread)(fd, data, size, at); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { return fails(fd) ? -1 : NEXT(pread64)(fd, data, size, at); }
