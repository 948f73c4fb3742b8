// The interpreter lock, for threads that may outlive the interpreter.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

namespace tagi_ddp {

// From now on only this thread takes the interpreter lock; other threads that want it sleep until
// the process ends. Python would end such a thread, and with it the process by SIGABRT.
void begin_process_end();
bool process_is_ending();

// Releases the interpreter lock until the end of the block.
class Unlocked {
 public:
    Unlocked();
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;
    ~Unlocked();

 private:
    PyThreadState* state_;
};

// Python objects that another thread's operation uses. They are freed under the interpreter lock.
struct HeldObjects {
    std::vector<nanobind::object> objects;
    ~HeldObjects();
};

// Runs the handlers of pending signals, and throws their exceptions.
void check_signals();

}  // namespace tagi_ddp
