/* Faults of a file system, for LD_PRELOAD.
 *
 * FAULTY_PATH: text in the paths of the files concerned.
 * FAULTY_CALLS: `CALL=ERRNO,...`; the calls are fsync_file, fsync_folder, rename_folder, symlink, flock and write; the
 *     error number 0 is a call that never returns.
 * FAULTY_TRIGGER: a file; faults begin when it exists. Without the variable they begin at once.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const int NO_FAULT = -1;

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

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

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
    return is_folder && fails("rename_folder", resolved(to, path)) ? -1 : REAL(rename)(from, to);
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
