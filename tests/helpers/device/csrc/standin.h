// A device of torch for tests: memory of its own that the host cannot touch, computed by torch's CPU kernels.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace standin {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

// An address on the device has this bit; no processor lets a process use such an address, so that host code
// that reads or writes device memory ends in a fault here too, and not in a result that is right by chance.
constexpr std::uintptr_t kMark = std::uintptr_t{1} << 52;

// Where the bytes of a device address are; only code that plays the device may ask.
inline void *host_address(const void *device_address) {
    return reinterpret_cast<void *>(reinterpret_cast<std::uintptr_t>(device_address) & ~kMark);
}

c10::DeviceAllocator *device_allocator();
c10::Allocator *pinned_allocator();
bool is_pinned_address(const void *address);
c10::DeviceIndex current_device();
c10::Stream current_stream(c10::DeviceIndex device);
// The generator of a device, and the generator of the host that draws for one.
const at::Generator &default_generator(c10::DeviceIndex device);
at::Generator drawing_generator(const at::Generator &of_device);

// A place in the order of a stream: after all that was entered so far.
struct Mark {
    c10::DeviceIndex device;
    c10::StreamId stream;
    std::uint64_t position;
};
Mark mark(const c10::Stream &stream);
// Do what is kept up to there; says whether nothing was left to do.
bool finish(const Mark &mark);
bool finish(const c10::Stream &stream);
void finish_device(c10::DeviceIndex device);
void copy_later(const c10::Stream &stream, std::function<void()> copy);
void wait_later(const c10::Stream &stream, const Mark &mark);

// Lines of the record of trace.cpp, while one is made.
void trace(const std::string &line);
void trace_copy(const at::Tensor &source, const at::Tensor &dest, const c10::Stream &stream, bool is_queued);

// Tensors of the device seen as tensors of the host over the same bytes; one storage stays one storage.
class HostViews {
public:
    at::Tensor view(const at::Tensor &on_device);
    // A host tensor over the bytes of an argument, as a tensor of the device; nothing for other memory.
    std::optional<at::Tensor> back(const at::Tensor &on_host) const;

private:
    std::vector<std::pair<at::Tensor, c10::Storage>> storages_; // of the device, and its bytes on the host
};

inline bool is_here(const at::Tensor &x) {
    return x.defined() && x.device().type() == kType;
}

} // namespace standin
