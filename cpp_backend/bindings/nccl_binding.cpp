#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <tuple>

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "nccl/nccl_rank.h"

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

// The address, number of elements and dtype of memory on the device.
using Memory = std::tuple<uintptr_t, size_t, std::string>;
using Counts = std::vector<size_t>;

Buffer as_buffer(const Memory& memory) {
    const auto& [address, count, name] = memory;
    for (uint32_t i = 0; i <= static_cast<uint32_t>(DType::u64); ++i) {
        const auto dtype = static_cast<DType>(i);
        if (name == name_of(dtype)) return {reinterpret_cast<void*>(address), count, dtype};
    }
    throw std::invalid_argument("dtype is \"" + name + "\", expected the name of one");
}

NcclId as_id(const nb::bytes& bytes) {
    NcclId id{};
    if (bytes.size() != id.bytes.size()) {
        throw std::invalid_argument("id has " + std::to_string(bytes.size()) +
                                    " bytes, expected 128");
    }
    std::memcpy(id.bytes.data(), bytes.c_str(), id.bytes.size());
    return id;
}

}  // namespace

void bind_nccl(nb::module_& module) {
    using nb::literals::operator""_a;
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;

    nb::class_<Cuda>(module, "Cuda", "CUDA's driver library, opened at run time.")
        .def(nb::init<const std::string&>(), "path"_a, Unlocked())
        .def_prop_ro("driver_version", &Cuda::driver_version)
        .def_prop_ro("device_count", &Cuda::device_count);

    nb::class_<Device>(module, "Device", "A CUDA device.")
        .def(nb::init<std::shared_ptr<Cuda>, int>(), "cuda"_a, "ordinal"_a)
        .def_prop_ro("ordinal", &Device::ordinal)
        .def_prop_ro("name", &Device::name)
        .def_prop_ro("compute_capability", &Device::compute_capability)
        .def_prop_ro("memory", &Device::memory, "Bytes.")
        .def("owner_of", &Device::owner_of, "pointer"_a,
             "Return the ordinal of the device that has this memory; -1 for host memory.");

    nb::class_<Nccl>(module, "Nccl", "NCCL 2.18 or newer, opened at run time.")
        .def(nb::init<const std::string&>(), "path"_a, Unlocked())
        .def_prop_ro("version", &Nccl::version, "22807 is 2.28.7.")
        .def_prop_ro("path", &Nccl::path)
        .def("unique_id", [](const Nccl& nccl) {
            const NcclId id = nccl.unique_id();
            return nb::bytes(id.bytes.data(), id.bytes.size());
        });

    nb::class_<NcclOperation>(module, "NcclOperation", "Operations that were called as one group.")
        .def("enqueued", &NcclOperation::enqueued, "limit"_a, Unlocked(),
             "Wait up to ``limit`` seconds until NCCL has put it into the stream; only then may "
             "another begin. Returns False if it has not.")
        .def("started", &NcclOperation::started, Unlocked())
        .def("complete", &NcclOperation::complete, "limit"_a, Unlocked())
        .def("order", &NcclOperation::order, "stream"_a, Unlocked(),
             "Make later work of the stream wait for it.")
        .def("extend", &NcclOperation::extend, "stream"_a, Unlocked(),
             "Include the present work of the stream in it.");

    nb::class_<NcclRank>(module, "NcclRank", "One rank of an NCCL communicator.")
        .def_static(
            "connect",
            [](std::shared_ptr<Nccl> nccl, std::shared_ptr<Device> device, int rank, int size,
               const nb::bytes& id, bool minimal) {
                const NcclId unique = as_id(id);
                nb::gil_scoped_release unlocked;
                return std::make_shared<NcclRank>(std::move(nccl), std::move(device), rank, size,
                                                  unique, minimal);
            },
            "nccl"_a, "device"_a, "rank"_a, "size"_a, "id"_a, "minimal"_a = false,
            "Begin to connect to the other ranks; ready() returns True once all are connected. "
            "If ``minimal``, use the least memory on the device, because make_blocking() follows.")
        .def("make_blocking", &NcclRank::make_blocking, Unlocked(),
             "Begin, on all ranks, to make NCCL's calls blocking; ready() returns True once they "
             "are.")
        .def("ready", &NcclRank::ready, "limit"_a, Unlocked())
        .def(
            "group",
            [](NcclRank& self, std::optional<uintptr_t> stream, const nb::callable& calls) {
                const nb::gil_scoped_release unlocked;
                return self.group(stream, [&] {
                    const nb::gil_scoped_acquire locked;
                    calls();
                });
            },
            "stream"_a.none(), "calls"_a,
            "Call ``calls``, and run its operations as one group, after the present work of "
            "``stream``.")
        .def("all_reduce",
             [](NcclRank& self, const Memory& in, const Memory& out, const std::string& op) {
                 const Buffer source = as_buffer(in);
                 self.all_reduce(source, as_buffer(out), as_reduce_op(op, source.dtype));
             })
        .def("broadcast", [](NcclRank& self, const Memory& buffer,
                             int root) { self.broadcast(as_buffer(buffer), root); })
        .def("all_gather",
             [](NcclRank& self, const Memory& in, const Memory& out, const Counts& counts) {
                 self.all_gather(as_buffer(in), as_buffer(out), counts);
             })
        .def("reduce_scatter",
             [](NcclRank& self, const Memory& in, const Memory& out, const Counts& counts,
                const std::string& op) {
                 const Buffer source = as_buffer(in);
                 self.reduce_scatter(source, as_buffer(out), counts,
                                     as_reduce_op(op, source.dtype));
             })
        .def("all_to_all",
             [](NcclRank& self, const Memory& in, const Memory& out, const Counts& sent,
                const Counts& received) {
                 self.all_to_all(as_buffer(in), as_buffer(out), sent, received);
             })
        .def("send", [](NcclRank& self, const Memory& buffer,
                        int dst) { self.send(as_buffer(buffer), dst); })
        .def("recv", [](NcclRank& self, const Memory& buffer,
                        int src) { self.recv(as_buffer(buffer), src); })
        .def("abort", &NcclRank::abort, Unlocked(), "End all operations, and free all resources.");
}

}  // namespace tagi_ddp
