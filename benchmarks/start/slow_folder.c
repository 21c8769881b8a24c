/* A folder shown read-only at another place, where each request of metadata takes as long as on a busy network file
 * system, and is counted. The kernel keeps no names and attributes unless it is told to.
 *
 *     slow_folder SOURCE MOUNT MICROSECONDS CACHE_SECONDS COUNTS_FILE
 *
 * COUNTS_FILE holds one unsigned 64-bit number for each of enum kind, in the machine's order, mapped and so always
 * up to date. Runs until it is unmounted. Written against the low-level interface of libfuse 3
 * (https://libfuse.github.io/doxygen/structfuse__lowlevel__ops.html). */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum kind { LOOKUP, GETATTR, OPEN, READLINK, OPENDIR, READDIR, READ, READ_BYTES, OTHER, KINDS };

static atomic_ulong *counts;
static long wait_microseconds;
static double cache_seconds;

/* The kernel names a file by the number of its inode below; this table has a path of each. Nothing is ever forgotten. */
#define BUCKETS (1 << 17)
struct node {
    ino_t ino;
    char *path;
    struct node *next;
};
static struct node *nodes[BUCKETS];
static pthread_mutex_t nodes_lock = PTHREAD_MUTEX_INITIALIZER;
static char *root;

static const char *path_of(fuse_ino_t ino)
{
    const char *path = NULL;
    if (ino == FUSE_ROOT_ID)
        return root;
    pthread_mutex_lock(&nodes_lock);
    for (struct node *n = nodes[ino % BUCKETS]; n && !path; n = n->next)
        if (n->ino == ino)
            path = n->path;
    pthread_mutex_unlock(&nodes_lock);
    return path;
}

static void remember(ino_t ino, const char *path)
{
    pthread_mutex_lock(&nodes_lock);
    struct node *n = nodes[ino % BUCKETS];
    while (n && n->ino != ino)
        n = n->next;
    if (!n && (n = malloc(sizeof *n))) {
        *n = (struct node){ino, strdup(path), nodes[ino % BUCKETS]};
        nodes[ino % BUCKETS] = n;
    }
    pthread_mutex_unlock(&nodes_lock);
}

static void request(enum kind kind)
{
    struct timespec span = {wait_microseconds / 1000000, wait_microseconds % 1000000 * 1000};
    atomic_fetch_add_explicit(&counts[kind], 1, memory_order_relaxed);
    if (kind != READ && wait_microseconds)
        nanosleep(&span, NULL);
}

static void lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry = {.attr_timeout = cache_seconds, .entry_timeout = cache_seconds};
    const char *above = path_of(parent);
    char path[PATH_MAX];
    request(LOOKUP);
    if (!above || snprintf(path, sizeof path, "%s/%s", above, name) >= (int)sizeof path) {
        fuse_reply_err(req, ENAMETOOLONG);
    } else if (lstat(path, &entry.attr) == 0) {
        entry.ino = entry.attr.st_ino;
        remember(entry.ino, path);
        fuse_reply_entry(req, &entry);
    } else if (errno == ENOENT && cache_seconds > 0) {
        fuse_reply_entry(req, &entry); /* inode 0: the kernel keeps it that there is no such name */
    } else {
        fuse_reply_err(req, errno);
    }
}

static void getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct stat about;
    const char *path = path_of(ino);
    (void)fi;
    request(GETATTR);
    if (path && lstat(path, &about) == 0)
        fuse_reply_attr(req, &about, cache_seconds);
    else
        fuse_reply_err(req, path ? errno : ESTALE);
}

static void read_link(fuse_req_t req, fuse_ino_t ino)
{
    char target[PATH_MAX];
    const char *path = path_of(ino);
    request(READLINK);
    ssize_t length = path ? readlink(path, target, sizeof target - 1) : -1;
    if (length < 0) {
        fuse_reply_err(req, path ? errno : ESTALE);
        return;
    }
    target[length] = 0;
    fuse_reply_readlink(req, target);
}

static void open_file(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    const char *path = path_of(ino);
    request(OPEN);
    if ((fi->flags & O_ACCMODE) != O_RDONLY) {
        fuse_reply_err(req, EROFS);
        return;
    }
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) {
        fuse_reply_err(req, path ? errno : ESTALE);
        return;
    }
    fi->fh = fd;
    fuse_reply_open(req, fi);
}

static void read_file(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
{
    struct fuse_bufvec data = FUSE_BUFVEC_INIT(size);
    (void)ino;
    request(READ);
    atomic_fetch_add_explicit(&counts[READ_BYTES], size, memory_order_relaxed);
    data.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
    data.buf[0].fd = (int)fi->fh;
    data.buf[0].pos = offset;
    fuse_reply_data(req, &data, FUSE_BUF_SPLICE_MOVE);
}

static void release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    close((int)fi->fh);
    fuse_reply_err(req, 0);
}

static void open_folder(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    const char *path = path_of(ino);
    request(OPENDIR);
    DIR *folder = path ? opendir(path) : NULL;
    if (!folder) {
        fuse_reply_err(req, path ? errno : ESTALE);
        return;
    }
    fi->fh = (uint64_t)(uintptr_t)folder;
    fuse_reply_open(req, fi);
}

static void read_folder(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
{
    DIR *folder = (DIR *)(uintptr_t)fi->fh;
    char *buffer = malloc(size);
    size_t used = 0;
    struct dirent *found;
    (void)ino;
    request(READDIR);
    if (!buffer) {
        fuse_reply_err(req, ENOMEM);
        return;
    }
    seekdir(folder, offset);
    while ((found = readdir(folder))) {
        struct stat about = {.st_ino = found->d_ino, .st_mode = DTTOIF(found->d_type)};
        size_t needed = fuse_add_direntry(req, buffer + used, size - used, found->d_name, &about, telldir(folder));
        if (needed > size - used)
            break;
        used += needed;
    }
    fuse_reply_buf(req, buffer, used);
    free(buffer);
}

static void release_folder(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    closedir((DIR *)(uintptr_t)fi->fh);
    fuse_reply_err(req, 0);
}

static void about_system(fuse_req_t req, fuse_ino_t ino)
{
    struct statvfs about;
    (void)ino;
    request(OTHER);
    if (statvfs(root, &about) == 0)
        fuse_reply_statfs(req, &about);
    else
        fuse_reply_err(req, errno);
}

static const struct fuse_lowlevel_ops operations = {
    .lookup = lookup,   .getattr = getattr,     .readlink = read_link,        .open = open_file,     .read = read_file,
    .release = release, .opendir = open_folder, .readdir = read_folder,       .releasedir = release_folder,
    .statfs = about_system,
};

static atomic_ulong *map_counts(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, KINDS * sizeof(atomic_ulong)) != 0)
        return MAP_FAILED;
    return mmap(NULL, KINDS * sizeof(atomic_ulong), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

int main(int argc, char **argv)
{
    if (argc != 6 || !(root = realpath(argv[1], NULL))) {
        fprintf(stderr, "slow_folder SOURCE MOUNT MICROSECONDS CACHE_SECONDS COUNTS_FILE\n");
        return 2;
    }
    wait_microseconds = atol(argv[3]);
    cache_seconds = atof(argv[4]);
    if ((counts = map_counts(argv[5])) == MAP_FAILED) {
        perror(argv[5]);
        return 2;
    }
    char *words[] = {argv[0], "-oro,fsname=slow_folder", geteuid() ? NULL : "-oallow_other", NULL};
    struct fuse_args args = FUSE_ARGS_INIT(geteuid() ? 2 : 3, words);
    struct fuse_session *session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) != 0 || fuse_session_mount(session, argv[2]) != 0)
        return 1;
    /* As many requests sleep at once as there are processes that ask: threads cost little, and a queue would add to the
     * latency that was asked for. */
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    fuse_loop_cfg_set_max_threads(loop, 512);
    fuse_loop_cfg_set_idle_threads(loop, 512);
    int code = fuse_session_loop_mt(session, loop);
    fuse_loop_cfg_destroy(loop);
    fuse_session_unmount(session);
    fuse_remove_signal_handlers(session);
    fuse_session_destroy(session);
    fuse_opt_free_args(&args);
    return code != 0;
}
