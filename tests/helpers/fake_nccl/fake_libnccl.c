/* A library with the functions of NCCL for tests without a GPU: it moves memory of the tests' device between processes
   through files of a folder, which is named by the unique id.

   What the real one leaves to devices happens here before a call returns, but what it may leave to another call does:
   communicators are made, and the first messages of one sent, while somebody asks how it is. What the real one answers
   with a hang or worse is an error here: calls while something is in progress, messages of different length. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { SEND, RECV };
#define MARK ((uintptr_t)1 << 52) /* of addresses of the tests' device */
#define MOST_RANKS 16
#define MOST_CALLS 256

typedef struct { char internal[128]; } UniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;
typedef struct { unsigned long to[MOST_RANKS], from[MOST_RANKS]; } Counts;
typedef struct {
    char folder[128];
    int size, rank, is_made, is_used, error;
    Counts counts;
} Comm;
typedef struct {
    int what, peer, type, op;
    char *memory;
    size_t bytes;
    Comm *comm;
    uintptr_t stream;
} Call;

static __thread Call calls[MOST_CALLS];
static __thread int call_count, depth;
static __thread char last_error[512];
static void (*finish)(uintptr_t);
static int (*break_at)(const char *);
static char journal[1 << 16];

void fake_nccl_use(void (*finish_stream)(uintptr_t)) { finish = finish_stream; }
void fake_nccl_break(int (*asked)(const char *)) { break_at = asked; }
const char *fake_nccl_journal(void) { return journal; }
void fake_nccl_forget(void) { journal[0] = 0; }

static void note(const char *name, size_t bytes, int peer) {
    char line[96];
    snprintf(line, sizeof line, "%s %zu %d\n", name, bytes, peer);
    if (strlen(journal) + strlen(line) < sizeof journal) strcat(journal, line);
}

static int refuse(int result, const char *text) {
    snprintf(last_error, sizeof last_error, "%s", text);
    return result;
}

static int exists(const char *path) { return access(path, F_OK) == 0; }
static void nap(void) { struct timespec t = {0, 200000}; nanosleep(&t, NULL); }

static void place(char *path, const Comm *c, const char *kind, int from, int to, unsigned long number) {
    snprintf(path, 256, "%s/%s.%d.%d.%lu", c->folder, kind, from, to, number);
}

static int is_dead(const Comm *c) {
    char path[256];
    snprintf(path, sizeof path, "%s/dead", c->folder);
    return exists(path);
}

static int put(Comm *c, int to, const char *memory, size_t bytes) {
    char path[256], made[264];
    place(path, c, "m", c->rank, to, c->counts.to[to]++);
    snprintf(made, sizeof made, "%s.new", path);
    FILE *file = fopen(made, "wb");
    if (!file || fwrite(memory, 1, bytes, file) != bytes || fclose(file) || rename(made, path))
        return refuse(SYSTEM, "fake: a file cannot be written");
    return OK;
}

static int take(Comm *c, int from, char *memory, size_t bytes) {
    char path[256];
    struct stat found;
    place(path, c, "m", from, c->rank, c->counts.from[from]++);
    for (int i = 0; !exists(path); ++i) {
        if (is_dead(c) || i > 300000) { c->error = REMOTE; return OK; } /* as a device: nobody is told at once */
        nap();
    }
    if (stat(path, &found) || (size_t)found.st_size != bytes) {
        c->error = INVALID_USAGE;
        return refuse(INVALID_USAGE, "fake: a message has another length than its receiver waits for");
    }
    FILE *file = fopen(path, "rb");
    int is_read = file && fread(memory, 1, bytes, file) == bytes;
    if (file) fclose(file);
    unlink(path);
    return is_read ? OK : refuse(SYSTEM, "fake: a file cannot be read");
}

/* Adds from the last rank to the first, so that floats show that it was the library that added. */
static int add_up(Comm *c, char *out, const char *parts, size_t bytes, int type, int op) {
    for (int r = c->size - 1; r >= 0; --r) {
        const char *part = parts + (size_t)r * bytes;
        if (r == c->size - 1) { memcpy(out, part, bytes); continue; }
#define ADD(T)                                                                                                         \
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {                                                                   \
        T *a = (T *)out + i, b = ((const T *)part)[i];                                                                 \
        *a = op == 0 ? *a + b : op == 1 ? *a * b : op == 2 ? (*a > b ? *a : b) : (*a < b ? *a : b);                    \
    }
        if (type == 7) { ADD(float) }
        else if (type == 8) { ADD(double) }
        else if (type == 4) { ADD(int64_t) }
        else if (type == 2) { ADD(int32_t) }
        else if (type == 1) { ADD(uint8_t) }
        else return refuse(INVALID_ARGUMENT, "fake: no sums of this type");
    }
    return OK;
}


static int send_all(Call *list, int count) {
    int result = OK;
    for (int i = 0; i < count; ++i)
        if (finish) finish(list[i].stream);
    for (int i = 0; i < count && !result; ++i)
        if (list[i].what == SEND) result = put(list[i].comm, list[i].peer, list[i].memory, list[i].bytes);
    return result;
}

static int take_all(Call *list, int count) {
    int result = OK;
    for (int i = 0; i < count && !result; ++i)
        if (list[i].what == RECV) result = take(list[i].comm, list[i].peer, list[i].memory, list[i].bytes);
    return result;
}

static int run(Call *list, int count) {
    int result = send_all(list, count);
    return result ? result : take_all(list, count);
}

static Call kept[MOST_CALLS]; /* what waits for connections */
static int kept_count;

static int have_come(Call *list, int count) {
    int ahead[MOST_RANKS] = {0};
    char path[256];
    for (int i = 0; i < count; ++i) {
        Comm *c = list[i].comm;
        if (list[i].what != RECV) continue;
        place(path, c, "m", list[i].peer, c->rank, c->counts.from[list[i].peer] + (unsigned long)ahead[list[i].peer]++);
        if (!exists(path)) return 0;
    }
    return 1;
}

static int submit(void) {
    int count = call_count;
    call_count = 0;
    if (!count) return OK;
    for (int i = 0; i < count; ++i) {
        Comm *c = calls[i].comm;
        if (!c->is_made || kept_count) return refuse(INVALID_USAGE, "fake: called while something is in progress");
        if (c->error) return refuse(c->error, "fake: the communicator has failed");
    }
    if (!calls[0].comm->is_used) { /* connections are made in another thread */
        for (int i = 0; i < count; ++i) calls[i].comm->is_used = 1;
        memcpy(kept, calls, sizeof(Call) * (size_t)count);
        kept_count = count;
        int result = send_all(kept, count);
        return result ? result : IN_PROGRESS;
    }
    return run(calls, count);
}

static int enter(const char *name, Comm *c, int what, const void *memory, size_t bytes, int peer, void *stream) {
    if (break_at && break_at(name)) return refuse(SYSTEM, "fake: asked to fail");
    if (peer < 0 || peer >= c->size) return refuse(INVALID_ARGUMENT, "fake: no such peer");
    if (call_count == MOST_CALLS) return refuse(INVALID_USAGE, "fake: too many calls in a group");
    char *host = (char *)((uintptr_t)memory & ~MARK);
    if (bytes && host == (const char *)memory) return refuse(INVALID_ARGUMENT, "fake: memory of the host");
    calls[call_count++] = (Call){what, peer, 0, 0, host, bytes, c, (uintptr_t)stream};
    return depth ? OK : submit();
}

static size_t width(int type) { return type < 2 ? 1 : type < 4 ? 4 : type < 6 ? 8 : type == 7 ? 4 : type == 8 ? 8 : 2; }

int ncclGetVersion(int *version) { *version = 22703; return OK; }
const char *ncclGetErrorString(int result) { return result == REMOTE ? "remote process exited" : "an error"; }
const char *ncclGetLastError(void *comm) { (void)comm; return last_error; }

int ncclGetUniqueId(UniqueId *id) {
    if (break_at && break_at("ncclGetUniqueId")) return refuse(SYSTEM, "fake: asked to fail");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/fake-nccl-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    return mkdtemp(id->internal) ? OK : refuse(SYSTEM, "fake: no folder");
}

int ncclCommInitRankConfig(Comm **comm, int size, UniqueId id, int rank, Config *config) {
    if (break_at && break_at("ncclCommInitRankConfig")) return refuse(SYSTEM, "fake: asked to fail");
    if (config->size != sizeof(Config) || config->magic != 0xcafebeef || config->version != 21400)
        return refuse(INVALID_ARGUMENT, "fake: a configuration of another layout");
    if (config->blocking || size > MOST_RANKS || rank < 0 || rank >= size)
        return refuse(INVALID_ARGUMENT, "fake: blocking, or no such rank");
    Comm *c = *comm = calloc(1, sizeof *c);
    char path[256];
    memcpy(c->folder, id.internal, sizeof id.internal);
    c->size = size, c->rank = rank;
    place(path, c, "here", rank, 0, 0);
    int file = open(path, O_CREAT | O_EXCL, 0600);
    if (file < 0) return refuse(INVALID_USAGE, "fake: two ranks with one number");
    close(file);
    note("init", (size_t)size, rank);
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm *c, int *state) {
    char path[256];
    if (!c->is_made) {
        for (int r = 0; r < c->size; ++r) {
            place(path, c, "here", r, 0, 0);
            if (!exists(path)) { *state = is_dead(c) ? REMOTE : IN_PROGRESS; return OK; }
        }
        c->is_made = 1;
    }
    if (kept_count && kept[0].comm == c) {
        if (!have_come(kept, kept_count)) { *state = is_dead(c) ? REMOTE : IN_PROGRESS; return OK; }
        int count = kept_count, result = take_all(kept, count);
        kept_count = 0;
        if (result) c->error = result;
    }
    if (is_dead(c) && !c->error) c->error = REMOTE;
    *state = c->error;
    return OK;
}

static void remove_folder(Comm *c) { /* the last rank finds it empty */
    char path[256];
    place(path, c, "here", c->rank, 0, 0);
    unlink(path);
    rmdir(c->folder);
}

int ncclCommFinalize(Comm *c) { note("finalize", 0, c->rank); return OK; }
int ncclCommDestroy(Comm *c) { note("destroy", 0, c->rank); remove_folder(c); free(c); return OK; }
int ncclCommAbort(Comm *c) {
    char path[256];
    note("abort", 0, c->rank);
    snprintf(path, sizeof path, "%s/dead", c->folder);
    int file = open(path, O_CREAT, 0600);
    if (file >= 0) close(file);
    if (kept_count && kept[0].comm == c) kept_count = 0;
    free(c);
    return OK;
}

int ncclGroupStart(void) { ++depth; return OK; }
int ncclGroupEnd(void) {
    if (!depth) return refuse(INVALID_USAGE, "fake: no group was begun");
    return --depth ? OK : submit();
}

int ncclSend(const void *x, size_t count, int type, int peer, Comm *c, void *stream) {
    note("send", count * width(type), peer);
    return enter("ncclSend", c, SEND, x, count * width(type), peer, stream);
}
int ncclRecv(void *x, size_t count, int type, int peer, Comm *c, void *stream) {
    note("recv", count * width(type), peer);
    return enter("ncclRecv", c, RECV, x, count * width(type), peer, stream);
}

static int everybody(const char *name, Comm *c, const char *x, size_t step, char *out, size_t bytes, void *stream) {
    int result = ncclGroupStart();
    for (int r = 0; r < c->size && !result; ++r) {
        result = enter(name, c, SEND, x + (size_t)r * step, bytes, r, stream);
        if (!result) result = enter(name, c, RECV, out + (size_t)r * bytes, bytes, r, stream);
    }
    int ended = ncclGroupEnd();
    return result ? result : ended;
}

int ncclAllGather(const void *x, void *out, size_t count, int type, Comm *c, void *stream) {
    note("all_gather", count * width(type), -1);
    return everybody("ncclAllGather", c, x, 0, out, count * width(type), stream);
}

int ncclBroadcast(const void *x, void *out, size_t count, int type, int root, Comm *c, void *stream) {
    size_t bytes = count * width(type);
    note("broadcast", bytes, root);
    int result = ncclGroupStart();
    for (int r = 0; r < c->size && !result && c->rank == root; ++r)
        if (r != root) result = enter("ncclBroadcast", c, SEND, x, bytes, r, stream);
    if (c->rank != root && !result) result = enter("ncclBroadcast", c, RECV, out, bytes, root, stream);
    int ended = ncclGroupEnd();
    return result ? result : ended;
}

static int sum(Comm *c, const void *x, size_t step, void *out, size_t bytes, int type, int op, void *stream) {
    if (!c->is_used) { /* sums need no connections that are made later here */
        c->is_used = 1;
    }
    char *parts = malloc(bytes * (size_t)c->size + 1);
    char *marked = (char *)((uintptr_t)parts | MARK);
    int result = everybody("sum", c, x, step, marked, bytes, stream);
    if (!result) result = add_up(c, (char *)((uintptr_t)out & ~MARK), parts, bytes, type, op);
    free(parts);
    return result;
}

int ncclAllReduce(const void *x, void *out, size_t count, int type, int op, Comm *c, void *stream) {
    note("all_reduce", count * width(type), op);
    return sum(c, x, 0, out, count * width(type), type, op, stream);
}
int ncclReduceScatter(const void *x, void *out, size_t count, int type, int op, Comm *c, void *stream) {
    note("reduce_scatter", count * width(type), op);
    return sum(c, x, count * width(type), out, count * width(type), type, op, stream);
}
