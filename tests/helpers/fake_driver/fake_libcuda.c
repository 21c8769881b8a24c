/* A driver without a device: what pycuda asks of libcuda.so.1 succeeds, and a launch runs the kernel on the host.
 *
 * Built by tests with one more file, which has `int NAME(void) { return 0; }` for every other function that pycuda links.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { kSuccess = 0, kNotFound = 500, kNoLibrary = 301, kInvalid = 1, kNoContext = 201 };

static _Thread_local int depth = 0; /* of pushed contexts */
static _Thread_local int runtime = 0; /* a call of the runtime makes its context current in its thread */
static int launches = 0;
static void *last_stream = NULL;

int cuGetErrorString(int error, const char **said) {
    *said = error == kSuccess ? "no error" : "an error of the fake driver";
    return kSuccess;
}
int cuDriverGetVersion(int *version) {
    *version = 13000;
    return kSuccess;
}
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return kSuccess;
}
int cuDeviceGetCount(int *count) {
    *count = 1;
    return kSuccess;
}
int cuCtxGetDevice(int *device) {
    *device = 0;
    return kSuccess;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = (void *)0x1000;
    return kSuccess;
}
int cuCtxPushCurrent_v2(void *context) {
    depth += context == (void *)0x1000;
    return context == (void *)0x1000 ? kSuccess : kInvalid;
}
int cuCtxPopCurrent_v2(void **context) {
    *context = (void *)0x1000;
    depth--;
    return kSuccess;
}
/* Only machine code is a module. */
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) {
    (void)count, (void)options, (void)values;
    *module = (void *)0x2000;
    return memcmp(image, "\x7f" "ELF", 4) ? kInvalid : kSuccess;
}
int cuCtxGetCurrent(void **context) {
    *context = depth || runtime ? (void *)0x1000 : NULL;
    return kSuccess;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    *function = strdup(name);
    return *function ? kSuccess : kNotFound;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
    static int (*launch)(const char *, const unsigned *, const unsigned *, size_t, const void *, size_t);
    const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    (void)params;
    if (!depth && !runtime) return kNoContext;
    if (!launch) {
        void *library = dlopen(getenv("MPISPEED_HOST_KERNELS"), RTLD_NOW);
        if (!library) return kNoLibrary;
        *(void **)&launch = dlsym(library, "mpispeed_host_launch");
    }
    launches++;
    last_stream = stream;
    return launch(function, grid, block, shared, extra[1], *(size_t *)extra[3]) ? kInvalid : kSuccess;
}

void mpispeed_fake_runtime_call(void) { runtime = 1; }
int mpispeed_fake_depth(void) { return depth; }
int mpispeed_fake_launches(void) { return launches; }
long mpispeed_fake_last_stream(void) { return (long)last_stream; }
