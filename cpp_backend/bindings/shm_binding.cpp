#include "bindings/shm_binding.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <set>
#include <stdexcept>
#include <utility>

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "bindings/interpreter.h"
#include "common/hash.h"
#include "shm/texts.h"

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

// Waits for `work`, in short intervals so that Ctrl-C works. Returns false if `limit` passes first;
// throws the error of an operation that failed.
bool wait_for(const std::shared_future<void>& work, double limit) {
    Unlocked unlocked;
    const auto deadline = after(limit);
    while (work.wait_for(check_interval) != std::future_status::ready) {
        check_signals();
        if (Clock::now() >= deadline) return false;
    }
    work.get();
    return true;
}

struct PyWork {
    std::shared_future<void> work;
    std::string where;

    void wait(std::optional<double> timeout) const {
        if (wait_for(work, timeout.value_or(forever))) return;
        throw CommunicatorError(ErrorKind::timeout, where + "not complete within " +
                                                        name_number(*timeout) +
                                                        " s, but it continues. Wait again.");
    }
    bool done() const {
        return work.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }
};

// Marks this thread as the one that runs an operation, until the end of the block.
class RunningMark {
 public:
    explicit RunningMark(std::atomic<std::thread::id>& thread) : thread_(thread) {
        thread_ = std::this_thread::get_id();
    }
    RunningMark(const RunningMark&) = delete;
    ~RunningMark() { thread_ = std::thread::id(); }

 private:
    std::atomic<std::thread::id>& thread_;
};

// The open communicators of this process.
struct {
    std::mutex mutex;
    std::set<PyShmCommunicator*> open;
} all;

}  // namespace

PyShmCommunicator::PyShmCommunicator(std::shared_ptr<ShmCommunicator> communicator, double timeout)
    : timeout(timeout), communicator_(std::move(communicator)) {
    std::lock_guard<std::mutex> lock(all.mutex);
    all.open.insert(this);
}

PyShmCommunicator::~PyShmCommunicator() { close(); }

void PyShmCommunicator::require_outside(const std::string& name,
                                        const OperationQueue& queue) const {
    if (queue.running.load() != std::this_thread::get_id()) return;
    throw CommunicatorError(ErrorKind::general,
                            where(name) +
                                "called by a signal handler, while its thread is in another "
                                "operation of this communicator. Call it after that one.");
}

std::string PyShmCommunicator::where(const std::string& name) const {
    return where_text(name, rank(), size(), communicator_->backend());
}

std::function<void()> PyShmCommunicator::bound(Operation operation, nb::handle seconds,
                                               bool is_collective) const {
    const double limit = seconds.is_none() ? timeout : as_seconds(seconds);
    const uint64_t hash = purpose.empty() ? 0 : hash_of(purpose);
    return [communicator = communicator_.get(), limit, hash, is_collective,
            operation = std::move(operation)] {
        if (is_collective) communicator->set_purpose(hash);
        operation(*communicator, limit);
    };
}

void PyShmCommunicator::run(OperationQueue& queue, const std::function<void()>& operation) {
    communicator_->require_own_process();
    if (queue.busy()) {
        const auto work = queue.thread->submit([&queue, operation] {
            std::lock_guard<std::mutex> lock(queue.mutex);
            operation();
        });
        try {
            wait_for(work, forever);         // the operation has its own timeout
        } catch (const nb::python_error&) {  // of a signal handler: the caller may free its buffers
            communicator_->abort("it was interrupted");
            Unlocked unlocked;
            work.wait();
            throw;
        }
        return;
    }
    Unlocked unlocked;
    std::lock_guard<std::mutex> lock(queue.mutex);
    const RunningMark mark(queue.running);
    operation();
}

nb::object PyShmCommunicator::start(OperationQueue& queue, const std::string& name,
                                    std::function<void()> operation, bool async_op,
                                    std::initializer_list<nb::handle> arrays) {
    if (!async_op || !queue.thread) {
        run(queue, operation);
        return nb::none();
    }
    communicator_->require_own_process();
    auto held = std::make_shared<HeldObjects>();
    for (nb::handle array : arrays) held->objects.push_back(nb::borrow(array));
    auto work = queue.thread->submit([&queue, held, operation = std::move(operation)] {
        std::lock_guard<std::mutex> lock(queue.mutex);
        operation();
    });
    return nb::cast(PyWork{std::move(work), where(name)});
}

nb::object PyShmCommunicator::collective(const char* name, bool async_op, nb::handle seconds,
                                         std::initializer_list<nb::handle> arrays,
                                         Operation operation) {
    auto ready = bound(std::move(operation), seconds, true);
    if (!async_op) require_outside(name, operations_);
    ++collectives_;
    std::string title = name;
    if (async_op) title += " #" + std::to_string(collectives_);
    return start(operations_, title, std::move(ready), async_op, arrays);
}

nb::object PyShmCommunicator::message(bool outgoing, int peer, bool async_op, nb::handle seconds,
                                      nb::handle array, Operation operation) {
    auto ready = bound(std::move(operation), seconds, false);
    OperationQueue& queue = outgoing ? sends_ : operations_;
    if (!async_op) require_outside(outgoing ? "send" : "recv", queue);
    const std::string name =
        (outgoing ? "send to rank " : "recv from rank ") + std::to_string(peer);
    return start(queue, name, std::move(ready), async_op, {array});
}

void PyShmCommunicator::abort(const std::string& reason, const std::vector<int>& ranks) {
    for (int rank : ranks) as_rank(nb::int_(rank), "ranks", size());
    std::lock_guard<std::recursive_mutex> lock(open_);
    communicator_->abort(reason, ranks);
}

void PyShmCommunicator::check() {
    std::lock_guard<std::recursive_mutex> lock(open_);
    communicator_->check();
}

void PyShmCommunicator::close() {
    for (const OperationQueue* queue : {&sends_, &operations_}) require_outside("close", *queue);
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        all.open.erase(this);
    }
    if (operations_.busy() || sends_.busy())
        communicator_->abort("it closed while operations were running");
    auto threads = std::make_unique<std::vector<std::shared_ptr<WorkQueue>>>();
    for (OperationQueue* queue : {&sends_, &operations_})
        threads->push_back(std::exchange(queue->thread, nullptr));
    // A fork has no such threads, and when the process ends one may never leave its operation.
    const bool forked = !communicator_->in_own_process();
    if (forked || process_is_ending()) {
        threads.release();  // NOLINT: leaked on purpose
        if (!forked && (!sends_.mutex.try_lock() || !operations_.mutex.try_lock())) return;
        communicator_->close();
        return;
    }
    Unlocked unlocked;
    threads.reset();
    // Operations of other threads end first, each within its timeout.
    std::scoped_lock operations(sends_.mutex, operations_.mutex);
    std::lock_guard<std::recursive_mutex> lock(open_);
    communicator_->close();
}

void PyShmCommunicator::end_with_process(const std::optional<std::string>& reason) {
    if (!communicator_->in_own_process()) return;
    if (reason) abort(*reason, {});
    try {
        for (OperationQueue* queue : {&sends_, &operations_}) {
            if (queue->busy()) run(*queue, [] {});
        }
    } catch (...) {
        close();
        throw;
    }
}

namespace {

// Returns an operation that calls `method` with the arguments and the timeout.
template <typename Method, typename... Arguments>
PyShmCommunicator::Operation call(Method method, Arguments... arguments) {
    return [method, arguments...](ShmCommunicator& communicator, double timeout) {
        (communicator.*method)(arguments..., timeout);
    };
}

nb::object all_reduce(PyShmCommunicator& self, nb::handle buffer, nb::handle op, nb::handle out,
                      bool async_op, nb::handle timeout) {
    const bool in_place = out.is_none();
    const Array in = as_array(buffer, "buffer", in_place);
    const Array result = in_place ? in : as_array(out, "out", true);
    require(result, "out", in.buffer.count, in.buffer.dtype);
    require_apart(in, result);
    const ReduceOp reduce_op = as_reduce_op(nb::cast<std::string>(nb::str(op)), in.buffer.dtype);
    return self.collective("all_reduce", async_op, timeout, {buffer, out},
                           call(&ShmCommunicator::all_reduce, in.buffer, result.buffer, reduce_op));
}

nb::object broadcast(PyShmCommunicator& self, nb::handle buffer, nb::handle root, bool async_op,
                     nb::handle timeout) {
    const int source = as_rank(root, "root", self.size());
    const Array array = as_array(buffer, "buffer", self.rank() != source);
    return self.collective("broadcast", async_op, timeout, {buffer},
                           call(&ShmCommunicator::broadcast, array.buffer, source));
}

nb::object all_gather(PyShmCommunicator& self, nb::handle buffer, nb::handle out, nb::handle counts,
                      bool async_op, nb::handle timeout) {
    const Array in = as_array(buffer, "buffer", false);
    const Array result = as_array(out, "out", true);
    const size_t n = static_cast<size_t>(self.size());
    const auto each = as_counts(counts, "counts", self.size(), in.buffer.count * n);
    require(in, "buffer", each[static_cast<size_t>(self.rank())], in.buffer.dtype);
    require(result, "out", total(each), in.buffer.dtype);
    require_apart(in, result);
    return self.collective("all_gather", async_op, timeout, {buffer, out},
                           call(&ShmCommunicator::all_gather, in.buffer, result.buffer, each));
}

nb::object reduce_scatter(PyShmCommunicator& self, nb::handle buffer, nb::handle out,
                          nb::handle counts, nb::handle op, bool async_op, nb::handle timeout) {
    const Array in = as_array(buffer, "buffer", false);
    const Array result = as_array(out, "out", true);
    const auto each = as_counts(counts, "counts", self.size(), in.buffer.count);
    require(in, "buffer", total(each), in.buffer.dtype);
    require(result, "out", each[static_cast<size_t>(self.rank())], in.buffer.dtype);
    require_apart(in, result);
    const ReduceOp reduce_op = as_reduce_op(nb::cast<std::string>(nb::str(op)), in.buffer.dtype);
    return self.collective(
        "reduce_scatter", async_op, timeout, {buffer, out},
        call(&ShmCommunicator::reduce_scatter, in.buffer, result.buffer, each, reduce_op));
}

nb::object all_to_all(PyShmCommunicator& self, nb::handle buffer, nb::handle out,
                      nb::handle send_counts, nb::handle recv_counts, bool async_op,
                      nb::handle timeout) {
    const Array in = as_array(buffer, "buffer", false);
    const Array result = as_array(out, "out", true);
    const auto sent = as_counts(send_counts, "send_counts", self.size(), in.buffer.count);
    const auto received = as_counts(recv_counts, "recv_counts", self.size(), result.buffer.count);
    require(in, "buffer", total(sent), in.buffer.dtype);
    require(result, "out", total(received), in.buffer.dtype);
    require_apart(in, result);
    return self.collective(
        "all_to_all", async_op, timeout, {buffer, out},
        call(&ShmCommunicator::all_to_all, in.buffer, result.buffer, sent, received));
}

nb::object send(PyShmCommunicator& self, nb::handle buffer, nb::handle dst, nb::handle tag,
                bool async_op, nb::handle timeout) {
    const int to = as_rank(dst, "dst", self.size()), number = as_integer(tag, "tag");
    if (to == self.rank())
        throw std::invalid_argument("dst is this rank itself; send to another rank");
    const Array array = as_array(buffer, "buffer", false);
    return self.message(true, to, async_op, timeout, buffer,
                        call(&ShmCommunicator::send, array.buffer, to, number));
}

nb::object recv(PyShmCommunicator& self, nb::handle buffer, nb::handle src, nb::handle tag,
                bool async_op, nb::handle timeout) {
    const int from = as_rank(src, "src", self.size()), number = as_integer(tag, "tag");
    if (from == self.rank())
        throw std::invalid_argument("src is this rank itself; receive from another rank");
    const Array array = as_array(buffer, "buffer", true);
    return self.message(false, from, async_op, timeout, buffer,
                        call(&ShmCommunicator::recv, array.buffer, from, number));
}

void barrier(PyShmCommunicator& self, nb::handle timeout) {
    self.collective("barrier", false, timeout, {}, call(&ShmCommunicator::barrier));
}

std::unique_ptr<PyShmCommunicator> split(PyShmCommunicator& self, nb::handle color,
                                         nb::handle key) {
    const int own = as_color(color), order = as_integer(key, "key");
    std::shared_ptr<ShmCommunicator> part;
    self.collective("split", false, nb::none(), {}, [&](ShmCommunicator& shm, double limit) {
        part = shm.split(own, order, limit);
    });
    if (!part) return nullptr;
    return std::make_unique<PyShmCommunicator>(std::move(part), self.timeout);
}

nb::object empty(PyShmCommunicator& self, nb::handle shape, nb::handle dtype) {
    const nb::object numpy = nb::module_::import_("numpy");
    const nb::object type = numpy.attr("dtype")(dtype);
    // numpy checks the shape and counts its elements.
    const nb::object extent = numpy.attr("broadcast_to")(nb::int_(0), shape);
    const size_t bytes =
        nb::cast<size_t>(extent.attr("size")) * nb::cast<size_t>(type.attr("itemsize"));
    auto memory = std::make_unique<std::shared_ptr<std::byte>>();
    self.collective("empty", false, nb::none(), {}, [&](ShmCommunicator& shm, double limit) {
        *memory = shm.allocate(bytes, limit);
    });
    std::byte* data = memory->get();
    nb::capsule owner(memory.release(), [](void* pointer) noexcept {
        delete static_cast<std::shared_ptr<std::byte>*>(pointer);
    });
    const nb::ndarray<nb::numpy, uint8_t> raw(data, {bytes}, owner);
    return nb::cast(raw).attr("view")(type).attr("reshape")(extent.attr("shape"));
}

}  // namespace

void bind_shm(nb::module_& module) {
    using nb::literals::operator""_a;

    nb::class_<PyWork>(module, "Work", "An asynchronous operation, which async_op=True returns.")
        .def("wait", &PyWork::wait, "timeout"_a = nb::none(),
             "Block until the operation is complete; raise its error if it failed.")
        .def("done", &PyWork::done, "Return True if the operation is complete or has failed.");

    module.def(
        "end_shm",
        [](const std::optional<std::string>& reason) {
            std::vector<nb::object> open;  // keeps them alive
            {
                std::lock_guard<std::mutex> lock(all.mutex);
                for (PyShmCommunicator* communicator : all.open) {
                    if (nb::object found = nb::find(communicator)) open.push_back(found);
                }
            }
            for (const nb::object& communicator : open) {
                nb::cast<PyShmCommunicator&>(communicator).end_with_process(reason);
            }
            begin_process_end();
        },
        "reason"_a.none(),
        "Wait for the operations of all communicators; given a reason, abort them first.");

    nb::class_<PyShmCommunicator>(
        module, "ShmCommunicator",
        "The communicator of the ranks of one host; see tagi_ddp.communicators.Communicator.",
        nb::is_weak_referenceable())
        .def(
            "__init__",
            [](PyShmCommunicator* self, int rank, int size, const std::string& job,
               const std::string& name, double timeout, bool spin, const std::string& backend,
               const std::string& version) {
                if (size < 1) throw std::invalid_argument("size must be at least 1");
                as_rank(nb::int_(rank), "rank", size);
                as_seconds(nb::float_(timeout));
                std::shared_ptr<ShmCommunicator> communicator;
                {
                    Unlocked unlocked;
                    communicator = std::make_shared<ShmCommunicator>(
                        rank, size, job, name, timeout, check_signals, spin, backend, version);
                }
                new (self) PyShmCommunicator(std::move(communicator), timeout);
            },
            "rank"_a, "size"_a, "job"_a, "name"_a, "timeout"_a, "spin"_a = true,
            "backend"_a = "shm", "version"_a = "")
        .def_prop_ro("rank", &PyShmCommunicator::rank)
        .def_prop_ro("size", &PyShmCommunicator::size)
        .def_prop_ro("backend", [](const PyShmCommunicator& self) { return self.get().backend(); })
        .def_prop_ro(
            "failed", [](const PyShmCommunicator& self) { return self.get().failed(); },
            "True if an error has broken it, also once it is closed.")
        .def_rw("purpose", &PyShmCommunicator::purpose,
                "The purpose of the next collectives, which the ranks compare too.")
        .def_prop_ro("device", [](const PyShmCommunicator&) { return "cpu"; })
        .def_prop_rw(
            "timeout", [](const PyShmCommunicator& self) { return self.timeout; },
            [](PyShmCommunicator& self, nb::handle seconds) { self.timeout = as_seconds(seconds); },
            nb::for_setter(nb::sig("def timeout(self, seconds: float, /) -> None")))
        .def_prop_ro(
            "seconds_waited",
            [](const PyShmCommunicator& self) { return self.get().seconds_waited(); },
            "The time for which operations have waited for other ranks so far.")
        .def("all_reduce", &all_reduce, "buffer"_a, "op"_a = "sum", nb::kw_only(),
             "out"_a = nb::none(), "async_op"_a = false, "timeout"_a = nb::none())
        .def("broadcast", &broadcast, "buffer"_a, "root"_a = 0, nb::kw_only(), "async_op"_a = false,
             "timeout"_a = nb::none())
        .def("all_gather", &all_gather, "buffer"_a, "out"_a, "counts"_a = nb::none(), nb::kw_only(),
             "async_op"_a = false, "timeout"_a = nb::none())
        .def("reduce_scatter", &reduce_scatter, "buffer"_a, "out"_a, "counts"_a = nb::none(),
             "op"_a = "sum", nb::kw_only(), "async_op"_a = false, "timeout"_a = nb::none())
        .def("all_to_all", &all_to_all, "buffer"_a, "out"_a, "send_counts"_a = nb::none(),
             "recv_counts"_a = nb::none(), nb::kw_only(), "async_op"_a = false,
             "timeout"_a = nb::none())
        .def("send", &send, "buffer"_a, "dst"_a, "tag"_a = 0, nb::kw_only(), "async_op"_a = false,
             "timeout"_a = nb::none())
        .def("recv", &recv, "buffer"_a, "src"_a, "tag"_a = 0, nb::kw_only(), "async_op"_a = false,
             "timeout"_a = nb::none())
        .def("barrier", &barrier, nb::kw_only(), "timeout"_a = nb::none())
        .def("split", &split, "color"_a.none(), "key"_a = 0)
        .def("empty", &empty, "shape"_a, "dtype"_a = "float32",
             "Return zeros in this communicator's own memory. all_reduce in place, reduce_scatter "
             "from it and all_gather to it make no intermediate copies. Collective: the size must "
             "be equal on all ranks.")
        .def("abort", &PyShmCommunicator::abort, "reason"_a, "ranks"_a = std::vector<int>())
        .def("check", &PyShmCommunicator::check)
        .def("close", &PyShmCommunicator::close)
        .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
        .def(
            "__exit__",
            [](PyShmCommunicator& self, nb::handle, nb::handle error, nb::handle) {
                if (!error.is_none()) {
                    self.abort(nb::cast<std::string>(error.type().attr("__name__")) + ": " +
                                   nb::cast<std::string>(nb::str(error)),
                               {});
                }
                self.close();
            },
            "kind"_a.none(), "error"_a.none(), "trace"_a.none());
}

}  // namespace tagi_ddp
