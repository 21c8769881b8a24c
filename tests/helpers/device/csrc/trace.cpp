// A record of what crosses between the host and the device, and of what the host waits for.
#include "standin.h"

#include <atomic>
#include <mutex>
#include <string>

#include <unistd.h>

namespace standin {
namespace {

std::atomic<bool> g_is_on{false};

std::mutex &trace_mutex() {
    static auto *value = new std::mutex();
    return *value;
}

std::string &trace_text() {
    static auto *value = new std::string();
    return *value;
}

} // namespace

void trace(const std::string &line) {
    if (g_is_on) {
        const std::lock_guard<std::mutex> lock(trace_mutex());
        trace_text() += (gettid() == getpid() ? "main " : "other ") + line + "\n";
    }
}

void trace_copy(const at::Tensor &source, const at::Tensor &dest, const c10::Stream &stream, bool is_queued) {
    if (g_is_on && is_here(source) != is_here(dest)) {
        trace(std::string(is_here(dest) ? "to_device " : "to_host ") + c10::toString(source.scalar_type()) + " " +
              c10::toString(dest.scalar_type()) + " " + std::to_string(source.numel()) +
              " " + std::to_string(stream.id()) + (is_queued ? " queued" : " blocking"));
    }
}

} // namespace standin

extern "C" {

void standin_trace_begin() {
    const std::lock_guard<std::mutex> lock(standin::trace_mutex());
    standin::trace_text().clear();
    standin::g_is_on = true;
}

void standin_trace_note(const char *line) {
    standin::trace(line);
}

// The lines so far; valid until the next record begins.
const char *standin_trace_end() {
    const std::lock_guard<std::mutex> lock(standin::trace_mutex());
    standin::g_is_on = false;
    return standin::trace_text().c_str();
}
}
