#include "bindings/shm_binding.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "bindings/interpreter.h"
#include "common/hash.h"
#include "shm/texts.h"

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

// Waits for `work`, in slices so that Ctrl-C works. False when `limit` passed first.
bool wait_for(Work& work, double limit) {
    Unlocked unlocked;
    const auto deadline = after(limit);
    while (!work.wait_for(look_around)) {
        check_signals();
        if (Clock::now() >= deadline) return false;
    }
    return true;
}

struct PyWork {
    std::shared_ptr<Work> work;
    std::string where;

    void wait(std::optional<double> timeout) const {
        if (wait_for(*work, timeout.value_or(forever))) return;
        throw CommunicatorError(
            ErrorKind::timeout,
            where + "not done within " + name_number(*timeout) + " s, it goes on. Wait again.");
    }
    bool done() const { return work->done(); }
};

// The thread that is in an operation, from here to the end of the block.
class Inside {
 public:
    explicit Inside(std::atomic<std::thread::id>& thread) : thread_(thread) {
        thread_ = std::this_thread::get_id();
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    ~Inside() { thread_ = std::thread::id(); }

 private:
    std::atomic<std::thread::id>& thread_;
};

// The communicators of this process.
struct {
    std::mutex mutex;
    std::set<PyShmCommunicator*> open;
} all;

}  // namespace

PyShmCommunicator::PyShmCommunicator(std::shared_ptr<ShmCommunicator> communicator, double timeout)
    : communicator_(std::move(communicator)), timeout_(timeout) {
    std::lock_guard<std::mutex> lock(all.mutex);
    all.open.insert(this);
}

PyShmCommunicator::~PyShmCommunicator() { close(); }

double PyShmCommunicator::seconds(nb::handle timeout) const {
    return timeout.is_none() ? timeout_ : as_seconds(timeout);
}

void PyShmCommunicator::require_outside(const std::string& name,
                                        const OperationQueue& queue) const {
    if (queue.running.load() != std::this_thread::get_id()) return;
    throw CommunicatorError(ErrorKind::general,
                            where_text(name, rank(), size(), communicator_->backend()) +
                                "called by a signal handler, while its thread is in another "
                                "operation of this communicator. Call it after that one.");
}

std::function<void()> PyShmCommunicator::for_purpose(std::function<void()> operation) const {
    const uint64_t purpose = purpose_.empty() ? 0 : hash_of(purpose_);
    return [communicator = communicator_.get(), purpose, operation = std::move(operation)] {
        communicator->set_purpose(purpose);
        operation();
    };
}

void PyShmCommunicator::run_collective(const char* name, const std::function<void()>& operation) {
    require_outside(name, operations_);
    ++collectives_;
    run(operations_, for_purpose(operation));
}

void PyShmCommunicator::run(OperationQueue& queue, const std::function<void()>& operation) {
    communicator_->require_own_process();
    if (queue.busy()) {
        const auto work = queue.thread->submit([&queue, operation] {
            std::lock_guard<std::mutex> lock(queue.mutex);
            operation();
        });
        try {
            wait_for(*work, forever);        // the operation has its own timeout
        } catch (const nb::python_error&) {  // of a signal handler: the caller's buffers may go
            communicator_->abort("it was interrupted");
            Unlocked unlocked;
            work->await_end();
            throw;
        }
        return;
    }
    Unlocked unlocked;
    std::lock_guard<std::mutex> lock(queue.mutex);
    const Inside inside(queue.running);
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
    auto kept = std::make_shared<Kept>();
    for (nb::handle array : arrays) kept->objects.push_back(nb::borrow(array));
    auto work = queue.thread->submit([&queue, kept, operation = std::move(operation)] {
        std::lock_guard<std::mutex> lock(queue.mutex);
        operation();
    });
    return nb::cast(
        PyWork{std::move(work), where_text(name, rank(), size(), communicator_->backend())});
}

nb::object PyShmCommunicator::start_collective(const char* name, std::function<void()> operation,
                                               bool async_op,
                                               std::initializer_list<nb::handle> arrays) {
    if (!async_op) require_outside(name, operations_);
    const std::string number = std::to_string(++collectives_);
    const std::string title = std::string(name) + " #" + number;
    return start(operations_, title, for_purpose(std::move(operation)), async_op, arrays);
}

nb::object PyShmCommunicator::all_reduce(nb::handle buffer, nb::handle op, nb::handle out,
                                         bool async_op, nb::handle timeout) {
    const bool in_place = out.is_none();
    const Array in = as_array(buffer, "buffer", in_place);
    const Array result = in_place ? in : as_array(out, "out", true);
    require(result, "out", in.buffer.count, in.buffer.dtype);
    require_apart(in, result);
    const ReduceOp reduce_op = as_reduce_op(nb::cast<std::string>(nb::str(op)), in.buffer.dtype);
    const double limit = seconds(timeout);
    return start_collective("all_reduce",
                            [this, a = in.buffer, b = result.buffer, reduce_op, limit] {
                                communicator_->all_reduce(a, b, reduce_op, limit);
                            },
                            async_op, {buffer, out});
}

nb::object PyShmCommunicator::broadcast(nb::handle buffer, nb::handle root, bool async_op,
                                        nb::handle timeout) {
    const int source = as_rank(root, "root", size());
    const Array array = as_array(buffer, "buffer", rank() != source);
    const double limit = seconds(timeout);
    return start_collective(
        "broadcast",
        [this, a = array.buffer, source, limit] { communicator_->broadcast(a, source, limit); },
        async_op, {buffer});
}

nb::object PyShmCommunicator::all_gather(nb::handle buffer, nb::handle out, nb::handle counts,
                                         bool async_op, nb::handle timeout) {
    const Array in = as_array(buffer, "buffer", false);
    const Array result = as_array(out, "out", true);
    const size_t n = static_cast<size_t>(size());
    const auto each = as_counts(counts, "counts", size(), in.buffer.count * n);
    require(in, "buffer", each[static_cast<size_t>(rank())], in.buffer.dtype);
    require(result, "out", total(each), in.buffer.dtype);
    require_apart(in, result);
    const double limit = seconds(timeout);
    return start_collective("all_gather",
                            [this, a = in.buffer, b = result.buffer, each, limit] {
                                communicator_->all_gather(a, b, each, limit);
                            },
                            async_op, {buffer, out});
}

nb::object PyShmCommunicator::reduce_scatter(nb::handle buffer, nb::handle out, nb::handle counts,
                                             nb::handle op, bool async_op, nb::handle timeout) {
    const Array in = as_array(buffer, "buffer", false);
    const Array result = as_array(out, "out", true);
    const auto each = as_counts(counts, "counts", size(), in.buffer.count);
    require(in, "buffer", total(each), in.buffer.dtype);
    require(result, "out", each[static_cast<size_t>(rank())], in.buffer.dtype);
    require_apart(in, result);
    const ReduceOp reduce_op = as_reduce_op(nb::cast<std::string>(nb::str(op)), in.buffer.dtype);
    const double limit = seconds(timeout);
    return start_collective("reduce_scatter",
                            [this, a = in.buffer, b = result.buffer, each, reduce_op, limit] {
                                communicator_->reduce_scatter(a, b, each, reduce_op, limit);
                            },
                            async_op, {buffer, out});
}

nb::object PyShmCommunicator::all_to_all(nb::handle buffer, nb::handle out, nb::handle send_counts,
                                         nb::handle recv_counts, bool async_op,
                                         nb::handle timeout) {
    const Array in = as_array(buffer, "buffer", false);
    const Array result = as_array(out, "out", true);
    const auto sent = as_counts(send_counts, "send_counts", size(), in.buffer.count);
    const auto received = as_counts(recv_counts, "recv_counts", size(), result.buffer.count);
    require(in, "buffer", total(sent), in.buffer.dtype);
    require(result, "out", total(received), in.buffer.dtype);
    require_apart(in, result);
    const double limit = seconds(timeout);
    return start_collective("all_to_all",
                            [this, a = in.buffer, b = result.buffer, sent, received, limit] {
                                communicator_->all_to_all(a, b, sent, received, limit);
                            },
                            async_op, {buffer, out});
}

nb::object PyShmCommunicator::send(nb::handle buffer, nb::handle dst, nb::handle tag, bool async_op,
                                   nb::handle timeout) {
    const int to = as_rank(dst, "dst", size()), number = as_integer(tag, "tag");
    if (to == rank()) throw std::invalid_argument("dst is this rank itself; send to another rank");
    const Array array = as_array(buffer, "buffer", false);
    const double limit = seconds(timeout);
    if (!async_op) require_outside("send", messages_out_);
    return start(
        messages_out_, "send to rank " + std::to_string(to),
        [this, a = array.buffer, to, number, limit] { communicator_->send(a, to, number, limit); },
        async_op, {buffer});
}

nb::object PyShmCommunicator::recv(nb::handle buffer, nb::handle src, nb::handle tag, bool async_op,
                                   nb::handle timeout) {
    const int from = as_rank(src, "src", size()), number = as_integer(tag, "tag");
    if (from == rank())
        throw std::invalid_argument("src is this rank itself; receive from another rank");
    const Array array = as_array(buffer, "buffer", true);
    const double limit = seconds(timeout);
    if (!async_op) require_outside("recv", operations_);
    return start(operations_, "recv from rank " + std::to_string(from),
                 [this, a = array.buffer, from, number, limit] {
                     communicator_->recv(a, from, number, limit);
                 },
                 async_op, {buffer});
}

void PyShmCommunicator::barrier(nb::handle timeout) {
    const double limit = seconds(timeout);
    run_collective("barrier", [this, limit] { communicator_->barrier(limit); });
}

std::unique_ptr<PyShmCommunicator> PyShmCommunicator::split(nb::handle color, nb::handle key) {
    const int own = as_color(color), place = as_integer(key, "key");
    std::shared_ptr<ShmCommunicator> part;
    run_collective("split", [&] { part = communicator_->split(own, place, timeout_); });
    if (!part) return nullptr;
    return std::make_unique<PyShmCommunicator>(std::move(part), timeout_);
}

nb::object PyShmCommunicator::empty(nb::handle shape, nb::handle dtype) {
    const nb::object numpy = nb::module_::import_("numpy");
    const nb::object type = numpy.attr("dtype")(dtype);
    // numpy checks the shape and counts its elements.
    const nb::object extent = numpy.attr("broadcast_to")(nb::int_(0), shape);
    const size_t bytes =
        nb::cast<size_t>(extent.attr("size")) * nb::cast<size_t>(type.attr("itemsize"));
    auto memory = std::make_unique<std::shared_ptr<std::byte>>();
    run_collective("empty", [&] { *memory = communicator_->allocate(bytes, timeout_); });
    std::byte* data = memory->get();
    nb::capsule owner(memory.release(), [](void* pointer) noexcept {
        delete static_cast<std::shared_ptr<std::byte>*>(pointer);
    });
    const nb::ndarray<nb::numpy, uint8_t> raw(data, {bytes}, owner);
    return nb::cast(raw).attr("view")(type).attr("reshape")(extent.attr("shape"));
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
    for (const OperationQueue* queue : {&messages_out_, &operations_})
        require_outside("close", *queue);
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        all.open.erase(this);
    }
    if (operations_.busy() || messages_out_.busy())
        communicator_->abort("it closed with operations under way");
    auto threads = std::make_unique<std::vector<std::shared_ptr<WorkQueue>>>();
    for (OperationQueue* queue : {&messages_out_, &operations_})
        threads->push_back(std::exchange(queue->thread, nullptr));
    // A fork has no such threads, and at the end one may stay in an operation for ever.
    const bool forked = !communicator_->in_own_process();
    if (forked || process_ends()) {
        threads.release();  // NOLINT: it is not to be destroyed
        if (!forked && (!messages_out_.mutex.try_lock() || !operations_.mutex.try_lock())) return;
        communicator_->close();
        return;
    }
    Unlocked unlocked;
    threads.reset();
    // Other threads end what they have begun, each within its limit.
    std::scoped_lock operations(messages_out_.mutex, operations_.mutex);
    std::lock_guard<std::recursive_mutex> lock(open_);
    communicator_->close();
}

void PyShmCommunicator::end_with_process(const std::optional<std::string>& reason) {
    if (!communicator_->in_own_process()) return;
    if (reason) abort(*reason, {});
    try {
        for (OperationQueue* queue : {&messages_out_, &operations_}) {
            if (queue->busy()) run(*queue, [] {});
        }
    } catch (...) {
        close();
        throw;
    }
}

void bind_shm(nb::module_& module) {
    using nb::literals::operator""_a;

    nb::class_<PyWork>(module, "Work", "An operation under way, as async_op=True returns it.")
        .def("wait", &PyWork::wait, "timeout"_a = nb::none(),
             "Block until the operation is complete; raise its error if it failed.")
        .def("done", &PyWork::done, "Tell whether the operation is complete or has failed.");

    module.def(
        "end_shm",
        [](const std::optional<std::string>& reason) {
            std::vector<nb::object> open;  // which then stay
            {
                std::lock_guard<std::mutex> lock(all.mutex);
                for (PyShmCommunicator* communicator : all.open) {
                    if (nb::object found = nb::find(communicator)) open.push_back(found);
                }
            }
            for (const nb::object& communicator : open) {
                nb::cast<PyShmCommunicator&>(communicator).end_with_process(reason);
            }
            this_thread_ends_the_process();
        },
        "reason"_a.none(),
        "Wait for what is under way over shared memory; with a reason abort all before.");

    nb::class_<PyShmCommunicator>(
        module, "ShmCommunicator",
        "Ranks of one host, over shared memory; see tagi_ddp.communicators.Communicator.",
        nb::is_weak_referenceable())
        .def(
            "__init__",
            [](PyShmCommunicator* self, int rank, int size, const std::string& job,
               const std::string& name, double timeout, bool spin, const std::string& backend) {
                if (size < 1) throw std::invalid_argument("size must be at least 1");
                as_rank(nb::int_(rank), "rank", size);
                as_seconds(nb::float_(timeout));
                std::shared_ptr<ShmCommunicator> communicator;
                {
                    Unlocked unlocked;
                    communicator = std::make_shared<ShmCommunicator>(rank, size, job, name, timeout,
                                                                     check_signals, spin, backend);
                }
                new (self) PyShmCommunicator(std::move(communicator), timeout);
            },
            "rank"_a, "size"_a, "job"_a, "name"_a, "timeout"_a, "spin"_a = true,
            "backend"_a = "shm")
        .def_prop_ro("rank", &PyShmCommunicator::rank)
        .def_prop_ro("size", &PyShmCommunicator::size)
        .def_prop_ro("backend", [](PyShmCommunicator& self) { return self.get().backend(); })
        .def_prop_ro("failed", &PyShmCommunicator::failed,
                     "Whether an error has broken it; still known once closed.")
        .def_prop_rw("purpose", &PyShmCommunicator::purpose, &PyShmCommunicator::set_purpose,
                     "What the next collectives are made for: part of what ranks compare.")
        .def_prop_ro("device", [](const PyShmCommunicator&) { return "cpu"; })
        .def_prop_rw(
            "timeout", &PyShmCommunicator::timeout,
            [](PyShmCommunicator& self, nb::handle seconds) {
                self.set_timeout(as_seconds(seconds));
            },
            nb::for_setter(nb::sig("def timeout(self, seconds: float, /) -> None")))
        .def_prop_ro("seconds_waited", &PyShmCommunicator::seconds_waited,
                     "How long operations have waited for other ranks so far.")
        .def("all_reduce", &PyShmCommunicator::all_reduce, "buffer"_a, "op"_a = "sum",
             nb::kw_only(), "out"_a = nb::none(), "async_op"_a = false, "timeout"_a = nb::none())
        .def("broadcast", &PyShmCommunicator::broadcast, "buffer"_a, "root"_a = 0, nb::kw_only(),
             "async_op"_a = false, "timeout"_a = nb::none())
        .def("all_gather", &PyShmCommunicator::all_gather, "buffer"_a, "out"_a,
             "counts"_a = nb::none(), nb::kw_only(), "async_op"_a = false, "timeout"_a = nb::none())
        .def("reduce_scatter", &PyShmCommunicator::reduce_scatter, "buffer"_a, "out"_a,
             "counts"_a = nb::none(), "op"_a = "sum", nb::kw_only(), "async_op"_a = false,
             "timeout"_a = nb::none())
        .def("all_to_all", &PyShmCommunicator::all_to_all, "buffer"_a, "out"_a,
             "send_counts"_a = nb::none(), "recv_counts"_a = nb::none(), nb::kw_only(),
             "async_op"_a = false, "timeout"_a = nb::none())
        .def("send", &PyShmCommunicator::send, "buffer"_a, "dst"_a, "tag"_a = 0, nb::kw_only(),
             "async_op"_a = false, "timeout"_a = nb::none())
        .def("recv", &PyShmCommunicator::recv, "buffer"_a, "src"_a, "tag"_a = 0, nb::kw_only(),
             "async_op"_a = false, "timeout"_a = nb::none())
        .def("barrier", &PyShmCommunicator::barrier, nb::kw_only(), "timeout"_a = nb::none())
        .def("split", &PyShmCommunicator::split, "color"_a.none(), "key"_a = 0)
        .def("empty", &PyShmCommunicator::empty, "shape"_a, "dtype"_a = "float32",
             "Return zeros in this communicator's own memory, where all_reduce in place, "
             "reduce_scatter from it and all_gather to it copy nothing in between. Collective: the "
             "same size on all ranks.")
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
