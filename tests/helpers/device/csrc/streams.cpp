// Streams whose copies happen as late as their order allows.
//
// Operations run at once, in the order of the program. A copy between the device and pinned memory that does
// not block is kept until something has to see it: the next operation of its stream, a wait for its stream or
// event, or an operation of a stream that waits for it. So a buffer that is read or used again too early
// holds other bytes in every run, and not once in a thousand.
#include "standin.h"

#include <deque>
#include <map>
#include <mutex>

namespace standin {
namespace {

using Key = std::pair<c10::DeviceIndex, c10::StreamId>;
// Work that is done is destroyed when nothing is locked: the end of a tensor may need Python's lock.
using Garbage = std::vector<std::function<void()>>;

struct Item {
    std::function<void()> copy; // empty: a wait
    Key awaited;
    std::uint64_t position = 0;
};

struct Queue {
    std::deque<Item> items;
    std::uint64_t entered = 0;
    std::uint64_t done = 0;
};

std::recursive_mutex &mutex() {
    static auto *value = new std::recursive_mutex();
    return *value;
}

std::map<Key, Queue> &queues() {
    static auto *value = new std::map<Key, Queue>();
    return *value;
}

void finish_locked(const Key &key, std::uint64_t position, Garbage &garbage) {
    Queue &queue = queues()[key];
    while (queue.done < position) {
        Item item = std::move(queue.items.front());
        queue.items.pop_front();
        ++queue.done;
        if (item.copy) {
            garbage.push_back(std::move(item.copy));
            garbage.back()();
        } else {
            finish_locked(item.awaited, item.position, garbage);
        }
    }
}

bool finish_key(const Key &key, std::uint64_t position) {
    Garbage garbage;
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    finish_locked(key, position, garbage);
    return garbage.empty();
}

Key key_of(const c10::Stream &stream) {
    return {stream.device_index(), stream.id()};
}

void enter(const c10::Stream &stream, Item item) {
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    Queue &queue = queues()[key_of(stream)];
    queue.items.push_back(std::move(item));
    ++queue.entered;
}

} // namespace

Mark mark(const c10::Stream &stream) {
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    return {stream.device_index(), stream.id(), queues()[key_of(stream)].entered};
}

bool finish(const Mark &mark) {
    return finish_key({mark.device, mark.stream}, mark.position);
}

bool finish(const c10::Stream &stream) {
    return finish(mark(stream));
}

void finish_device(c10::DeviceIndex device) {
    Garbage garbage;
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    std::vector<Key> keys;
    for (const auto &[key, queue] : queues()) {
        keys.push_back(key);
    }
    for (const auto &key : keys) {
        if (key.first == device) {
            finish_locked(key, queues()[key].entered, garbage);
        }
    }
}

void copy_later(const c10::Stream &stream, std::function<void()> copy) {
    enter(stream, {std::move(copy), {}, 0});
}

void wait_later(const c10::Stream &stream, const Mark &mark) {
    enter(stream, {{}, {mark.device, mark.stream}, mark.position});
}

} // namespace standin
