/* Faults in file calls: preload this library (LD_PRELOAD) and every changing file call below a folder is counted, over all
 * processes together, and fails, kills or waits as asked. The environment says what:
 *
 *   FAULTS_UNDER    the folder; calls on other paths pass unseen
 *   FAULTS_COUNTER  a file of 8 bytes, shared by the processes: calls so far, and the process group to kill
 *   FAULTS          rules, comma-separated. WHEN is at=17 (that call), from=17 (it and all later ones), match=fsync (all of a
 *                   kind); what then: WHEN:kill (this process, by SIGKILL), WHEN:kill-all (the first process's group too),
 *                   WHEN:ENOSPC, WHEN:EIO, WHEN:EDQUOT, WHEN:EROFS
 *   FAULTS_SLOW     microseconds:folder - every call below that folder takes so much longer
 *   FAULTS_LOG      a file that gets a line per call: number, kind, path
 *
 * Kinds: open (for writing) write truncate fsync rename unlink mkdir link.
 * A process that changed its environment after it began calls faults_reload().
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct shared {
    uint32_t calls;
    int32_t group;
};
struct rule {
    uint32_t first, last;
    char kind[12];
    int error; /* 0: kill, -1: kill all */
};

static char under[PATH_MAX], slow_under[PATH_MAX];
static struct shared *shared;
static struct rule rules[16];
static int num_rules, log_fd = -1;
static long slow_us;

/* ---- what the environment asks for ---- */

static int error_named(const char *name) {
    if (!strcmp(name, "kill")) return 0;
    if (!strcmp(name, "kill-all")) return -1;
    if (!strcmp(name, "ENOSPC")) return ENOSPC;
    if (!strcmp(name, "EIO")) return EIO;
    if (!strcmp(name, "EDQUOT")) return EDQUOT;
    if (!strcmp(name, "EROFS")) return EROFS;
    static const char message[] = "file_calls: FAULTS names an unknown error\n";
    syscall(SYS_write, 2, message, sizeof message - 1);
    _exit(2);
}

static void read_rules(const char *text) {
    char copy[512], *rest = copy, *word;
    strncpy(copy, text, sizeof copy - 1);
    copy[sizeof copy - 1] = 0;
    for (num_rules = 0; (word = strsep(&rest, ",")) && num_rules < 16;) {
        char *what = strchr(word, ':');
        if (!what) continue;
        *what++ = 0;
        struct rule *rule = &rules[num_rules++];
        *rule = (struct rule){0, UINT32_MAX, "", error_named(what)};
        if (!strncmp(word, "at=", 3)) rule->first = rule->last = atoi(word + 3);
        if (!strncmp(word, "from=", 5)) rule->first = atoi(word + 5);
        if (!strncmp(word, "match=", 6)) strncpy(rule->kind, word + 6, sizeof rule->kind - 1);
    }
}

static void read_folder(char *folder, const char *text) {
    folder[0] = 0;
    if (text && *text && !realpath(text, folder)) snprintf(folder, PATH_MAX, "%s", text);
}

__attribute__((constructor)) void faults_reload(void) {
    const char *counter = getenv("FAULTS_COUNTER"), *slow = getenv("FAULTS_SLOW"), *log = getenv("FAULTS_LOG");
    read_rules(getenv("FAULTS") ? getenv("FAULTS") : "");
    read_folder(under, getenv("FAULTS_UNDER"));
    slow_us = slow ? atol(slow) : 0;
    read_folder(slow_under, slow && strchr(slow, ':') ? strchr(slow, ':') + 1 : NULL);
    log_fd = log && *log ? syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    shared = NULL;
    if (!counter || !*counter) return;
    int fd = syscall(SYS_openat, AT_FDCWD, counter, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || syscall(SYS_ftruncate, fd, sizeof *shared)) _exit(2);
    void *page = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (page == MAP_FAILED) _exit(2);
    shared = page;
    int32_t nobody = 0;
    __atomic_compare_exchange_n(&shared->group, &nobody, getpgrp(), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* ---- one call ---- */

static int below(const char *path, const char *folder) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || path[length] == 0);
}

static void path_of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

/* The path with its folder's links and dots resolved; what it names itself need not exist. */
static void path_at(int folder, const char *name, char *path) {
    char base[PATH_MAX] = "", joined[2 * PATH_MAX + 2], real[PATH_MAX];
    if (name[0] != '/') {
        if (folder != AT_FDCWD) path_of_fd(folder, base);
        else if (!getcwd(base, sizeof base)) base[0] = 0;
    }
    snprintf(joined, sizeof joined, "%s%s%s", base, name[0] == '/' ? "" : "/", name);
    size_t length = strlen(joined);
    while (length > 1 && joined[length - 1] == '/') joined[--length] = 0;
    char *last = strrchr(joined, '/');
    *last = 0;
    if (!realpath(*joined ? joined : "/", real)) snprintf(real, sizeof real, "%s", joined);
    if (snprintf(path, PATH_MAX, "%s/%s", real, last + 1) >= PATH_MAX) path[0] = 0;
}

/* Count the call and carry out what the rules say of it; an error number to fail with, or 0. */
static int meet(const char *kind, const char *path) {
    if (slow_us && below(path, slow_under)) {
        struct timespec pause = {slow_us / 1000000, slow_us % 1000000 * 1000};
        nanosleep(&pause, NULL);
    }
    if (!shared || !below(path, under)) return 0;
    uint32_t number = __atomic_add_fetch(&shared->calls, 1, __ATOMIC_SEQ_CST);
    if (log_fd >= 0) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%u %s %s\n", number, kind, path);
        syscall(SYS_write, log_fd, line, length);
    }
    for (int i = 0; i < num_rules; i++) {
        const struct rule *rule = &rules[i];
        if (number < rule->first || number > rule->last || (rule->kind[0] && strcmp(rule->kind, kind))) continue;
        int full = rule->error == ENOSPC || rule->error == EDQUOT;
        if (full && !strcmp(kind, "unlink")) continue; /* removing needs no room */
        if (rule->error > 0) return rule->error;
        if (rule->error < 0) kill(-shared->group, SIGKILL);
        kill(getpid(), SIGKILL);
    }
    return 0;
}

static int meet_fd(const char *kind, int fd) {
    char path[PATH_MAX];
    if (!shared && !slow_us) return 0;
    int before = errno;
    path_of_fd(fd, path);
    errno = before;
    return meet(kind, path);
}

static int meet_at(const char *kind, int folder, const char *name) {
    char path[PATH_MAX];
    if (!shared && !slow_us) return 0;
    path_at(folder, name, path);
    return meet(kind, path);
}

/* ---- the calls ---- */

#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
/* type name(parameters): fails when `check` says so, else is the C library's own */
#define CALL(type, name, parameters, arguments, check) \
    type name parameters {                             \
        static typeof(&name) next;                     \
        if (!next) next = NEXT(name);                  \
        int fault = (check);                           \
        if (fault) {                                   \
            errno = fault;                             \
            return -1;                                 \
        }                                              \
        return next arguments;                         \
    }
#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & (O_CREAT | O_TRUNC)))
#define MODE(flags, mode)                               \
    mode_t mode = 0;                                    \
    if ((flags) & (O_CREAT | O_TMPFILE)) {              \
        va_list list;                                   \
        va_start(list, flags);                          \
        mode = va_arg(list, mode_t);                    \
        va_end(list);                                   \
    }
#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...) {                                      \
        MODE(flags, mode)                                                             \
        int fault = WRITES(flags) ? meet_at("open", AT_FDCWD, path) : 0;              \
        if (fault) {                                                                  \
            errno = fault;                                                            \
            return -1;                                                                \
        }                                                                             \
        return NEXT(name)(path, flags, mode);                                         \
    }
#define OPEN_AT(name)                                                                 \
    int name(int folder, const char *path, int flags, ...) {                          \
        MODE(flags, mode)                                                             \
        int fault = WRITES(flags) ? meet_at("open", folder, path) : 0;                \
        if (fault) {                                                                  \
            errno = fault;                                                            \
            return -1;                                                                \
        }                                                                             \
        return NEXT(name)(folder, path, flags, mode);                                 \
    }
#define FOPEN(name)                                                                   \
    FILE *name(const char *path, const char *mode) {                                  \
        int fault = strpbrk(mode, "wa+") ? meet_at("open", AT_FDCWD, path) : 0;       \
        if (fault) {                                                                  \
            errno = fault;                                                            \
            return NULL;                                                              \
        }                                                                             \
        return NEXT(name)(path, mode);                                                \
    }
OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
FOPEN(fopen)
FOPEN(fopen64)
CALL(int, creat, (const char *path, mode_t mode), (path, mode), meet_at("open", AT_FDCWD, path))

CALL(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), meet_fd("write", fd))
CALL(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), meet_fd("write", fd))
CALL(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), meet_fd("write", fd))
CALL(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), meet_fd("write", fd))
extern ssize_t sendfile(int, int, off_t *, size_t);
extern ssize_t sendfile64(int, int, off64_t *, size_t);
CALL(ssize_t, sendfile, (int to, int from, off_t *at, size_t size), (to, from, at, size), meet_fd("write", to))
CALL(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t size), (to, from, at, size), meet_fd("write", to))
CALL(ssize_t, copy_file_range, (int from, off64_t *start, int to, off64_t *at, size_t size, unsigned flags),
     (from, start, to, at, size, flags), meet_fd("write", to))

CALL(int, truncate, (const char *path, off_t size), (path, size), meet_at("truncate", AT_FDCWD, path))
CALL(int, ftruncate, (int fd, off_t size), (fd, size), meet_fd("truncate", fd))
CALL(int, ftruncate64, (int fd, off64_t size), (fd, size), meet_fd("truncate", fd))
CALL(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), meet_fd("truncate", fd))
CALL(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size), meet_fd("truncate", fd))

CALL(int, fsync, (int fd), (fd), meet_fd("fsync", fd))
CALL(int, fdatasync, (int fd), (fd), meet_fd("fsync", fd))

CALL(int, rename, (const char *old, const char *new), (old, new), meet_at("rename", AT_FDCWD, new))
CALL(int, renameat, (int from, const char *old, int to, const char *new), (from, old, to, new), meet_at("rename", to, new))
CALL(int, renameat2, (int from, const char *old, int to, const char *new, unsigned flags), (from, old, to, new, flags),
     meet_at("rename", to, new))

CALL(int, unlink, (const char *path), (path), meet_at("unlink", AT_FDCWD, path))
CALL(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags), meet_at("unlink", folder, path))
CALL(int, rmdir, (const char *path), (path), meet_at("unlink", AT_FDCWD, path))
CALL(int, remove, (const char *path), (path), meet_at("unlink", AT_FDCWD, path))
CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), meet_at("mkdir", AT_FDCWD, path))
CALL(int, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), meet_at("mkdir", folder, path))
CALL(int, link, (const char *old, const char *new), (old, new), meet_at("link", AT_FDCWD, new))
CALL(int, linkat, (int from, const char *old, int to, const char *new, int flags), (from, old, to, new, flags),
     meet_at("link", to, new))
CALL(int, symlink, (const char *old, const char *new), (old, new), meet_at("link", AT_FDCWD, new))
