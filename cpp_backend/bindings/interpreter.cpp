#include "bindings/interpreter.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "common/clock.h"

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

constexpr double patience = 5.0;  // seconds

std::atomic<std::thread::id> last_thread{};  // no thread before the process ends
std::atomic<int> admitted{0};                // threads in blocks of Admission, none in a fork
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { admitted = 0; });

// Lets this thread take the interpreter lock until the end of the block; it sleeps forever instead
// if the process ends by another thread.
class Admission {
 public:
    Admission() {
        ++admitted;
        const std::thread::id thread = last_thread;
        if (thread == std::thread::id() || thread == std::this_thread::get_id()) return;
        --admitted;
        while (true) pause();
    }
    Admission(const Admission&) = delete;
    Admission& operator=(const Admission&) = delete;
    ~Admission() { --admitted; }
};

}  // namespace

void begin_process_end() {
    last_thread = std::this_thread::get_id();
    // Those that were admitted before get the lock now: later, Python would end them.
    for (const auto end = after(patience); admitted > 0 && Clock::now() < end;) {
        PyThreadState* const state = PyEval_SaveThread();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        PyEval_RestoreThread(state);
    }
}

bool process_is_ending() { return last_thread.load() != std::thread::id(); }

Unlocked::Unlocked() : state_(PyEval_SaveThread()) {}

Unlocked::~Unlocked() {
    const Admission admission;
    PyEval_RestoreThread(state_);
}

HeldObjects::~HeldObjects() {
    const Admission admission;
    nb::gil_scoped_acquire lock;
    objects.clear();
}

void check_signals() {
    const Admission admission;
    nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace tagi_ddp
