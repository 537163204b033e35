/* Faults of a file system, for LD_PRELOAD.
 *
 * FAULTY_PATH: text in the paths of the files concerned.
 * FAULTY_CALLS: `CALL=ERRNO,...`; the calls are fsync_file, fsync_folder, rename_file, rename_folder, symlink, unlink,
 *     rmdir, flock and write; the error number 0 is a call that never returns, 999 one in which the process is killed,
 *     once: it removes the trigger before.
 * FAULTY_TRIGGER: a file; faults begin when it exists. Without the variable they begin at once.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const int NO_FAULT = -1;
static const int KILL = 999;

static int fault(const char *call, const char *path) {
    const char *mark = getenv("FAULTY_PATH"), *calls = getenv("FAULTY_CALLS"), *trigger = getenv("FAULTY_TRIGGER");
    if (!mark || !calls || !strstr(path, mark) || (trigger && access(trigger, F_OK) != 0))
        return NO_FAULT;
    for (const char *entry = calls; entry; entry = strchr(entry, ',') ? strchr(entry, ',') + 1 : NULL) {
        size_t length = strlen(call);
        if (strncmp(entry, call, length) == 0 && entry[length] == '=')
            return atoi(entry + length + 1);
    }
    return NO_FAULT;
}

/* Return whether the call must fail; a fault without an error number never returns. */
static int fails(const char *call, const char *path) {
    int number = fault(call, path);
    if (number == NO_FAULT)
        return 0;
    while (number == 0)
        pause();
    if (number == KILL) {
        if (REAL(unlink)(getenv("FAULTY_TRIGGER")) != 0)
            return 0; /* another process was killed */
        kill(getpid(), SIGKILL);
    }
    errno = number;
    return 1;
}

static const char *path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, 4095);
    path[length > 0 ? length : 0] = 0;
    return path;
}

/* Return the path of a name in its folder, whose own path may be a link such as /proc/self/fd/3. */
static const char *resolved(const char *name, char *path) {
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", name);
    char *slash = strrchr(folder, '/');
    const char *base = slash ? name + (slash - folder) + 1 : name;
    if (slash)
        *slash = 0;
    if (!realpath(slash ? (folder[0] ? folder : "/") : ".", path))
        return name;
    size_t length = strlen(path);
    snprintf(path + length, 4095 - length, "/%s", base);
    return path;
}

int fsync(int descriptor) {
    char path[4096];
    struct stat status;
    int is_folder = fstat(descriptor, &status) == 0 && S_ISDIR(status.st_mode);
    if (fails(is_folder ? "fsync_folder" : "fsync_file", path_of(descriptor, path)))
        return -1;
    return REAL(fsync)(descriptor);
}

int rename(const char *from, const char *to) {
    char path[8192];
    struct stat status;
    int is_folder = lstat(from, &status) == 0 && S_ISDIR(status.st_mode);
    return fails(is_folder ? "rename_folder" : "rename_file", resolved(to, path)) ? -1 : REAL(rename)(from, to);
}

int unlink(const char *name) {
    char path[8192];
    return fails("unlink", resolved(name, path)) ? -1 : REAL(unlink)(name);
}

int unlinkat(int folder, const char *name, int flags) {
    char path[8192];
    const char *call = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
    const char *where = folder == AT_FDCWD ? resolved(name, path) : path_of(folder, path);
    return fails(call, where) ? -1 : REAL(unlinkat)(folder, name, flags);
}

int rmdir(const char *name) {
    char path[8192];
    return fails("rmdir", resolved(name, path)) ? -1 : REAL(rmdir)(name);
}

int symlink(const char *target, const char *path) {
    char resolved_path[8192];
    return fails("symlink", resolved(path, resolved_path)) ? -1 : REAL(symlink)(target, path);
}

int flock(int descriptor, int operation);
int flock(int descriptor, int operation) {
    char path[4096];
    return fails("flock", path_of(descriptor, path)) ? -1 : REAL(flock)(descriptor, operation);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    char path[4096];
    if (getenv("FAULTY_PATH") && fails("write", path_of(descriptor, path)))
        return -1;
    return REAL(write)(descriptor, data, size);
}
