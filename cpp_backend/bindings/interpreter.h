// The interpreter lock, for threads that may outlive the interpreter.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

namespace tagi_ddp {

// From here on only this thread takes the interpreter lock. Python would end another thread that
// wants it, and so the process, by SIGABRT: such a thread waits for the end instead.
void this_thread_ends_the_process();
bool process_ends();

// Gives up the interpreter lock until the end of the block.
class Unlocked {
 public:
    Unlocked();
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;
    ~Unlocked();

 private:
    PyThreadState* state_;
};

// Python objects that an operation on a thread of ours needs; they go under the interpreter lock.
struct Kept {
    std::vector<nanobind::object> objects;
    ~Kept();
};

// Runs the handlers of signals that have come, and throws what they raise.
void check_signals();

}  // namespace tagi_ddp
