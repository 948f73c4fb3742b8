#include "bindings/interpreter.h"

#include <unistd.h>

#include <atomic>
#include <thread>

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

std::atomic<std::thread::id> ending{};

void stay_out_at_the_end() {
    const std::thread::id thread = ending;
    while (thread != std::thread::id() && thread != std::this_thread::get_id()) pause();
}

}  // namespace

void this_thread_ends_the_process() { ending = std::this_thread::get_id(); }

bool process_ends() { return ending.load() != std::thread::id(); }

Unlocked::Unlocked() : state_(PyEval_SaveThread()) {}

Unlocked::~Unlocked() {
    stay_out_at_the_end();
    PyEval_RestoreThread(state_);
}

Kept::~Kept() {
    stay_out_at_the_end();
    nb::gil_scoped_acquire lock;
    objects.clear();
}

void check_signals() {
    stay_out_at_the_end();
    nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace tagi_ddp
