// Memory of the device and pinned memory of the host, both counted.
#include "standin.h"

#include <ATen/EmptyTensor.h>

#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace standin {
namespace {

constexpr std::size_t kAlignment = 512; // as CUDA's allocator of torch

struct Block {
    void *bytes;
    std::size_t size;
    c10::DeviceIndex device;
};

void *allocate_bytes(std::size_t size) {
    void *bytes = nullptr;
    TORCH_CHECK(posix_memalign(&bytes, kAlignment, size) == 0, "stand-in device: no memory for ", size,
                " bytes");
    // Not a number in every float format: a result that uses memory nobody wrote shows it.
    std::memset(bytes, 0xFF, size);
    return bytes;
}

using Stats = c10::CachingDeviceAllocator::DeviceStats;
constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

class DeviceMemory final : public c10::DeviceAllocator {
public:
    c10::DataPtr allocate(std::size_t size) override {
        const c10::Device device(kType, current_device());
        if (size == 0) {
            return {nullptr, device};
        }
        auto *block = new Block{allocate_bytes(size), size, device.index()};
        count(device.index(), size, true);
        auto *address = reinterpret_cast<void *>(reinterpret_cast<std::uintptr_t>(block->bytes) | kMark);
        return {address, block, &DeviceMemory::release, device};
    }

    void copy_data(void *dest, const void *source, std::size_t size) const override {
        std::memcpy(host_address(dest), host_address(source), size);
    }

    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr &, c10::Stream) override {}

    Stats getDeviceStats(c10::DeviceIndex device) override {
        std::lock_guard<std::mutex> lock(mutex_);
        return stats_.at(device);
    }
    void resetAccumulatedStats(c10::DeviceIndex device) override {
        std::lock_guard<std::mutex> lock(mutex_);
        stats_.at(device).allocated_bytes[kAll].reset_accumulated();
        stats_.at(device).allocation[kAll].reset_accumulated();
    }
    void resetPeakStats(c10::DeviceIndex device) override {
        std::lock_guard<std::mutex> lock(mutex_);
        stats_.at(device).allocated_bytes[kAll].reset_peak();
        stats_.at(device).allocation[kAll].reset_peak();
    }

private:
    static void release(void *context);

    void count(c10::DeviceIndex device, std::size_t size, bool is_more) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto &bytes = stats_.at(device).allocated_bytes[kAll];
        auto &blocks = stats_.at(device).allocation[kAll];
        is_more ? bytes.increase(size) : bytes.decrease(size);
        is_more ? blocks.increase(1) : blocks.decrease(1);
    }

    std::mutex mutex_;
    std::array<Stats, kDevices> stats_;
};

// Bits of a lazy conjugate or negative belong to a tensor and not to its memory.
at::Tensor with_bits_of(const at::Tensor &x, at::Tensor result) {
    if (result.is_conj() != x.is_conj()) {
        result._set_conj(x.is_conj());
    }
    if (result.is_neg() != x.is_neg()) {
        result._set_neg(x.is_neg());
    }
    return result;
}

DeviceMemory &device_memory() {
    static auto *memory = new DeviceMemory(); // never destroyed: tensors may be the last to go
    return *memory;
}

void DeviceMemory::release(void *context) {
    auto *block = static_cast<Block *>(context);
    device_memory().count(block->device, block->size, false);
    std::free(block->bytes);
    delete block;
}

class PinnedMemory final : public c10::Allocator {
public:
    c10::DataPtr allocate(std::size_t size) override {
        if (size == 0) {
            return {nullptr, c10::Device(c10::kCPU)};
        }
        void *bytes = allocate_bytes(size);
        std::lock_guard<std::mutex> lock(mutex_);
        ends_[reinterpret_cast<std::uintptr_t>(bytes)] = reinterpret_cast<std::uintptr_t>(bytes) + size;
        return {bytes, bytes, &PinnedMemory::release, c10::Device(c10::kCPU)};
    }

    void copy_data(void *dest, const void *source, std::size_t size) const override {
        default_copy_data(dest, source, size);
    }

    bool holds(const void *address) {
        const auto value = reinterpret_cast<std::uintptr_t>(address);
        std::lock_guard<std::mutex> lock(mutex_);
        const auto after = ends_.upper_bound(value);
        return after != ends_.begin() && value < std::prev(after)->second;
    }

private:
    static void release(void *bytes);

    std::mutex mutex_;
    std::map<std::uintptr_t, std::uintptr_t> ends_;
};

PinnedMemory &pinned_memory() {
    static auto *memory = new PinnedMemory();
    return *memory;
}

void PinnedMemory::release(void *bytes) {
    {
        std::lock_guard<std::mutex> lock(pinned_memory().mutex_);
        pinned_memory().ends_.erase(reinterpret_cast<std::uintptr_t>(bytes));
    }
    std::free(bytes);
}

const bool kHasMemory = (c10::SetAllocator(kType, &device_memory()), true);

} // namespace

c10::DeviceAllocator *device_allocator() {
    return &device_memory();
}
c10::Allocator *pinned_allocator() {
    return &pinned_memory();
}
bool is_pinned_address(const void *address) {
    return pinned_memory().holds(address);
}

at::Tensor HostViews::view(const at::Tensor &x) {
    const auto &storage = x.storage();
    const auto end = x.numel() == 0 ? 0
                                    : at::detail::computeStorageNbytes(x.sizes(), x.strides(),
                                                                       x.element_size(), x.storage_offset());
    TORCH_CHECK(end <= storage.nbytes(), "stand-in device: a tensor of shape ", x.sizes(), " needs ", end,
                " bytes of a storage of ", storage.nbytes(), ": its memory was given back by resize_()");
    const c10::Storage *host = nullptr;
    for (const auto &[on_device, host_storage] : storages_) {
        host = on_device.storage().is_alias_of(storage) ? &host_storage : host;
    }
    if (host == nullptr) {
        c10::DataPtr bytes(host_address(storage.data()), c10::Device(c10::kCPU));
        c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), nullptr,
                          false);
        storages_.emplace_back(x, std::move(made));
        host = &storages_.back().second;
    }
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(*host), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
    return with_bits_of(x, std::move(result));
}

std::optional<at::Tensor> HostViews::back(const at::Tensor &x) const {
    for (const auto &[on_device, host_storage] : storages_) {
        if (x.has_storage() && x.storage().is_alias_of(host_storage)) {
            auto result = at::detail::make_tensor<c10::TensorImpl>(
                c10::TensorImpl::VIEW, c10::Storage(on_device.storage()), on_device.key_set(), x.dtype());
            result.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
            return with_bits_of(x, std::move(result));
        }
    }
    return std::nullopt;
}

} // namespace standin

extern "C" {
std::int64_t standin_bytes(int device, int is_peak) {
    const auto stat = standin::device_allocator()->getDeviceStats(device).allocated_bytes[standin::kAll];
    return is_peak ? stat.peak : stat.current;
}
void standin_reset_peak(int device) {
    standin::device_allocator()->resetPeakStats(device);
}
}
