// What both stand-ins use: objects by handle, delays, and the faults that tests inject.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#define STAND_IN_API extern "C" __attribute__((visibility("default")))

namespace stand_in {

// Never destroyed: threads of streams may still use it while the process ends.
template <typename T>
T& immortal() {
    static T* const object = std::make_unique<T>().release();
    return *object;
}

// Objects by their handles. A stale handle finds nothing.
template <typename T>
class Registry {
 public:
    void* add(const std::shared_ptr<T>& object) {
        const std::lock_guard lock(mutex_);
        objects_[object.get()] = object;
        return object.get();
    }

    std::shared_ptr<T> find(void* handle) {
        const std::lock_guard lock(mutex_);
        const auto found = objects_.find(handle);
        return found == objects_.end() ? nullptr : found->second;
    }

    std::shared_ptr<T> remove(void* handle) {
        const std::lock_guard lock(mutex_);
        const auto node = objects_.extract(handle);
        return node.empty() ? nullptr : node.mapped();
    }

 private:
    std::mutex mutex_;
    std::map<void*, std::shared_ptr<T>> objects_;
};

// A short random time, so that what lacks an order shows.
inline void dawdle() {
    thread_local std::minstd_rand random(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

struct Fault {
    enum class Kind {
        none,
        code,      // the call returns the number
        hang,      // what the call starts never completes
        progress,  // the call never leaves "in progress"
        async,     // the call succeeds, the communicator reports the number later
        value,     // the call answers with the number
        flag,      // a name alone
    };
    Kind kind = Kind::none;
    int number = 0;
};

// A fault without effect would make a test that cannot fail.
[[noreturn]] inline void reject(const std::string& fault) {
    std::fprintf(stderr, "stand-in: cannot do the fault %s\n", fault.c_str());
    std::abort();
}

// The faults of TAGI_DDP_STAND_IN_FAULT, for example "ncclSend:hang@1,cuEventQuery=700#3": each is
// a function and what happens there, on all ranks or on rank 1, at once or from the third call on.
class Faults {
 public:
    // Counts a call of `function` on `rank` and says what shall happen to it. Calls count from the
    // moment when the variable changed.
    Fault find(const std::string& function, int rank) {
        const char* variable = std::getenv("TAGI_DDP_STAND_IN_FAULT");
        const std::string text = variable == nullptr ? "" : variable;
        const std::lock_guard lock(mutex_);
        if (text != text_) {
            text_ = text;
            calls_.clear();
        }
        if (text.empty()) return {};
        const int call = ++calls_[{function, rank}];
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find(',', begin), text.size());
            const Fault fault = parse(text.substr(begin, end - begin), function, rank, call);
            if (fault.kind != Fault::Kind::none) return fault;
            begin = end + 1;
        }
        return {};
    }

 private:
    static Fault parse(std::string item, const std::string& function, int rank, int call) {
        const int from_call = take_suffix(item, '#', 1);
        const int on_rank = take_suffix(item, '@', rank);
        const size_t name = item.find_first_of("=:");
        if (item.substr(0, name) != function || on_rank != rank || call < from_call) return {};
        const std::string action = name == std::string::npos ? "" : item.substr(name);
        if (action.empty()) return {Fault::Kind::flag, 0};
        if (action == ":hang") return {Fault::Kind::hang, 0};
        if (action == ":progress") return {Fault::Kind::progress, 0};
        const size_t number = action.find('=') + 1;
        const std::string kind = action.substr(0, number);
        if (kind == "=") return {Fault::Kind::code, std::stoi(action.substr(number))};
        if (kind == ":async=") return {Fault::Kind::async, std::stoi(action.substr(number))};
        if (kind == ":value=") return {Fault::Kind::value, std::stoi(action.substr(number))};
        reject(item);
    }

    // The number after the last `mark` of `item`, which loses both.
    static int take_suffix(std::string& item, char mark, int otherwise) {
        const size_t place = item.rfind(mark);
        if (place == std::string::npos) return otherwise;
        const int number = std::stoi(item.substr(place + 1));
        item.erase(place);
        return number;
    }

    std::mutex mutex_;
    std::string text_;
    std::map<std::pair<std::string, int>, int> calls_;
};

// The rank of calls that know none.
inline int rank_of_process() {
    const char* variable = std::getenv("TAGI_DDP_STAND_IN_RANK");
    return variable == nullptr || *variable == '\0' ? -1 : std::atoi(variable);
}

// What shall happen to this call of `function`, which knows no other kinds of faults than codes and
// the given ones.
inline Fault find_fault(const char* function, std::initializer_list<Fault::Kind> kinds = {},
                        int rank = rank_of_process()) {
    const Fault fault = immortal<Faults>().find(function, rank);
    if (fault.kind != Fault::Kind::none && fault.kind != Fault::Kind::code &&
        std::find(kinds.begin(), kinds.end(), fault.kind) == kinds.end()) {
        reject(std::string("of this kind in ") + function);
    }
    return fault;
}

}  // namespace stand_in
