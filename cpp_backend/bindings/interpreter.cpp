#include "bindings/interpreter.h"

#include <unistd.h>

#include <atomic>
#include <thread>

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

std::atomic<std::thread::id> last_thread{};  // no thread before the process ends

void block_at_process_end() {
    const std::thread::id thread = last_thread;
    while (thread != std::thread::id() && thread != std::this_thread::get_id()) pause();
}

}  // namespace

void begin_process_end() { last_thread = std::this_thread::get_id(); }

bool process_is_ending() { return last_thread.load() != std::thread::id(); }

Unlocked::Unlocked() : state_(PyEval_SaveThread()) {}

Unlocked::~Unlocked() {
    block_at_process_end();
    PyEval_RestoreThread(state_);
}

HeldObjects::~HeldObjects() {
    block_at_process_end();
    nb::gil_scoped_acquire lock;
    objects.clear();
}

void check_signals() {
    block_at_process_end();
    nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace tagi_ddp
