/* What a tensor object is, asked without Python calls, by the exchange functions of DLPack 1 (dlpack.h,
 * DLPackExchangeAPI). A framework offers them as the capsule `__dlpack_c_exchange_api__` of its tensor type. */
#ifndef MPISPEED_DLPACK_VIEW_H
#define MPISPEED_DLPACK_VIEW_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} mps_dl_tensor;

typedef struct mps_dl_header {
    uint32_t major, minor;
    struct mps_dl_header *older;
} mps_dl_header;

typedef struct {
    mps_dl_header header;
    void *allocate, *from_object, *to_object;
    int (*view)(void *object, mps_dl_tensor *out); /* non-owning; -1 with a Python error */
    void *stream;
} mps_dl_api;

/* The functions of major version 1, or NULL. */
static inline const mps_dl_api *mps_dl_find(void *capsule) {
    mps_dl_header *header = (mps_dl_header *)capsule;
    while (header && header->major != 1) header = header->older;
    const mps_dl_api *api = (const mps_dl_api *)header;
    return api && api->view ? api : NULL;
}

/* The number by which loops know a dtype: 1 fp32, 2 bf16, 3 fp16; 0 any other. */
static inline int mps_dl_kind(const mps_dl_tensor *x) {
    if (x->lanes != 1) return 0;
    if (x->code == 2) return x->bits == 32 ? 1 : x->bits == 16 ? 3 : 0;
    return x->code == 4 && x->bits == 16 ? 2 : 0;
}

/* Elements of a contiguous tensor in host memory; -1 for any other. */
static inline int64_t mps_dl_count(const mps_dl_tensor *x) {
    int is_host = x->device_type == 1 || x->device_type == 3 || x->device_type == 11; /* plain or pinned */
    int is_contiguous = 1;
    int64_t count = 1;
    for (int32_t d = x->ndim - 1; d >= 0; d--) {
        if (x->shape[d] != 1 && x->strides && x->strides[d] != count) is_contiguous = 0;
        count *= x->shape[d];
    }
    return is_host && (is_contiguous || count == 0) ? count : -1;
}

#endif
