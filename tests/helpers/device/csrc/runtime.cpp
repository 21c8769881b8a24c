// Devices, streams, events, random numbers and what else torch asks an accelerator for.
#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

namespace standin {
namespace {

thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<c10::StreamId, kDevices> t_streams{};
std::atomic<c10::StreamId> g_last_stream{0};

c10::DeviceIndex checked(c10::DeviceIndex device) {
    TORCH_CHECK(device >= -1 && device < kDevices, "stand-in device: there is no device ", int(device));
    return device < 0 ? t_device : device;
}

c10::Stream as_stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

struct Event {
    double milliseconds;
    Mark mark;
};

double now_milliseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = kType;

    c10::DeviceType type() const override { return kType; }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return {kType, t_device}; }
    void setDevice(c10::Device device) const override { t_device = checked(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        t_device = device.index() < 0 ? t_device : device.index();
    }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

    c10::Stream getStream(c10::Device device) const override {
        const auto index = checked(device.index());
        return as_stream(index, t_streams.at(index));
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return as_stream(checked(device.index()), 0);
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return as_stream(checked(device.index()), ++g_last_stream);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        auto &current = t_streams.at(checked(stream.device_index()));
        const auto before = as_stream(stream.device_index(), current);
        current = stream.id();
        return before;
    }
    // A question is answered with no once, if there was something to do, so that callers are seen to ask
    // again.
    bool queryStream(const c10::Stream &stream) const override { return finish(stream); }
    void synchronizeStream(const c10::Stream &stream) const override {
        trace(finish(stream) ? "wait stream idle" : "wait stream");
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        trace("wait device");
        finish_device(checked(device));
    }

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex device,
                const c10::EventFlag) const override {
        TORCH_CHECK(device == -1 || device == stream.device_index(), "stand-in device: an event of device ",
                    int(device), " recorded on a stream of device ", int(stream.device_index()));
        *event = *event == nullptr ? new Event{} : *event;
        *static_cast<Event *>(*event) = {now_milliseconds(), mark(stream)};
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (event != nullptr) {
            wait_later(stream, static_cast<Event *>(event)->mark);
        }
    }
    bool queryEvent(void *event) const override {
        return event == nullptr || finish(static_cast<Event *>(event)->mark);
    }
    void synchronizeEvent(void *event) const override {
        trace(queryEvent(event) ? "wait event idle" : "wait event");
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event *>(event);
    }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex) const override {
        TORCH_CHECK(first && second,
                    "stand-in device: both events have to be recorded before their times are compared");
        return static_cast<Event *>(second)->milliseconds - static_cast<Event *>(first)->milliseconds;
    }
};

// Draws what the CPU's generator would from the same seed, out of a state of its own.
class DeviceGenerator final : public c10::GeneratorImpl {
public:
    explicit DeviceGenerator(c10::DeviceIndex device,
                             std::uint64_t seed = c10::detail::getNonDeterministicRandom())
        : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          drawing(at::detail::createCPUGenerator(seed)) {}

    void set_current_seed(std::uint64_t seed) override { drawing.set_current_seed(seed); }
    std::uint64_t current_seed() const override { return drawing.current_seed(); }
    std::uint64_t seed() override { return drawing.seed(); }
    void set_offset(std::uint64_t offset) override { drawing.set_offset(offset); }
    std::uint64_t get_offset() const override { return drawing.get_offset(); }
    void set_state(const c10::TensorImpl &state) override {
        drawing.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return drawing.unsafeGetGeneratorImpl()->get_state();
    }

    at::Generator drawing;

private:
    DeviceGenerator *clone_impl() const override {
        auto *copy = new DeviceGenerator(device_.index(), 0);
        copy->drawing = drawing.clone();
        return copy;
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kDevices; }
    void setCurrentDevice(c10::DeviceIndex device) const override { t_device = checked(device); }
    c10::DeviceIndex getCurrentDevice() const override { return t_device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return std::exchange(t_device, checked(device));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return exchangeDevice(device);
    }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(checked(device));
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return at::make_generator<DeviceGenerator>(checked(device));
    }
    bool isPinnedPtr(const void *address) const override { return is_pinned_address(address); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return pinned_allocator(); }

    void resizePrivateUse1Bytes(const c10::Storage &storage, std::size_t size) const override {
        const auto before = t_device;
        t_device = checked(storage.device().index());
        finish(current_stream(t_device)); // may use the memory, and is before this in its order
        auto bytes = device_allocator()->allocate(size);
        t_device = before;
        if (const auto kept = std::min(size, storage.nbytes()); kept > 0) {
            device_allocator()->copy_data(bytes.get(), storage.data(), kept);
        }
        auto *impl = storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(std::move(bytes));
        impl->set_nbytes(size);
    }
};

const bool kHasHooks = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

c10::DeviceIndex current_device() {
    return t_device;
}
c10::Stream current_stream(c10::DeviceIndex device) {
    return as_stream(device, t_streams.at(device));
}

const at::Generator &default_generator(c10::DeviceIndex device) {
    static const auto *generators = new std::array<at::Generator, kDevices>{
        at::make_generator<DeviceGenerator>(c10::DeviceIndex{0}),
        at::make_generator<DeviceGenerator>(c10::DeviceIndex{1}),
    };
    return generators->at(device);
}

at::Generator drawing_generator(const at::Generator &of_device) {
    return of_device.get<DeviceGenerator>()->drawing;
}

TORCH_LIBRARY(standin, m) {
    m.def("default_generator", [](std::int64_t device) -> at::Generator {
        return default_generator(checked(static_cast<c10::DeviceIndex>(device)));
    });
}

} // namespace standin
