#include "bindings/update_binding.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/parameters_binding.h"
#include "update/agreement.h"
#include "update/apply.h"
#include "update/compress.h"
#include "update/sharded.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tagi_ddp {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_compressed(const Floats& values, int bits, const Bytes& bytes) {
    if (bits != 8 && bits != 16) throw std::invalid_argument("bits must be 8 or 16");
    if (values.size() % compress_block != 0 ||
        bytes.size() != compressed_bytes(values.size(), bits)) {
        throw std::invalid_argument("expected whole blocks of floats, and bytes for all of them");
    }
}

}  // namespace

Step SharedStep::operator()(int64_t batch, bool finished) const {
    Step result;
    const double timeout = communicator_.timeout();
    communicator_.run_collective("step", [&] {
        result =
            step(communicator_.get(), parameters_, bucket_, batch, finished, average_, timeout);
    });
    return result;
}

void bind_update(nb::module_& module) {
    module.attr("LEAST_VARIANCE") = least_variance;
    nb::list factors;
    for (const CapFactor& entry : cap_factors) {
        factors.append(nb::make_tuple(entry.smallest_batch, entry.factor));
    }
    module.attr("CAP_FACTORS") = nb::tuple(factors);
    module.def("cap_factor", &cap_factor, "batch"_a, "The engine's cap factor for a batch size.");

    nb::class_<Contribution>(module, "Contribution", "What one rank brings to a step.")
        .def(
            "__init__",
            [](Contribution* self, int64_t batch, bool finite, bool finished) {
                new (self) Contribution{batch, finite, finished};
            },
            "batch"_a, "finite"_a = true, "finished"_a = false)
        .def_ro("batch", &Contribution::batch)
        .def_ro("finite", &Contribution::finite)
        .def_ro("finished", &Contribution::finished);
    nb::class_<Agreement>(module, "Agreement", "What all ranks agreed on for a step.")
        .def(nb::init<const std::vector<Contribution>&>(), "ranks"_a)
        .def_ro("batch", &Agreement::batch)
        .def_ro("active", &Agreement::active)
        .def_ro("not_finite", &Agreement::not_finite)
        .def_ro("all_finished", &Agreement::all_finished)
        .def_prop_ro("applies", &Agreement::applies)
        .def("divisor", &Agreement::divisor, "average"_a)
        .def("cap", &Agreement::cap, "average"_a);
    nb::class_<SharedStep>(module, "SharedStep",
                           "The step of the ranks of a host over their shared memory: one "
                           "collective that votes, checks, reduces, caps and applies.")
        .def(
            "__init__",
            [](SharedStep* self, PyShmCommunicator& communicator, const Parameters& parameters,
               const Floats& bucket, bool average) {
                new (self)
                    SharedStep(communicator, parameters, checked(parameters, bucket), average);
            },
            "communicator"_a, "parameters"_a, "bucket"_a, "average"_a, nb::keep_alive<1, 2>(),
            nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
            "The bucket is memory that the communicator has allocated.")
        .def(
            "__call__",
            [](const SharedStep& self, int64_t batch, bool finished) {
                Step step = self(batch, finished);
                return std::make_pair(step.agreement, step.culprit);
            },
            "batch"_a, "finished"_a,
            "Step, with the deltas of `batch` samples of this rank, 0: none. Return the agreement, "
            "and the first layer of this rank with a delta that is NaN or infinite, or \"\".");
    module.attr("COMPRESS_BLOCK") = compress_block;
    module.def("compressed_bytes", &compressed_bytes, "count"_a, "bits"_a,
               "The bytes of so many floats, a multiple of COMPRESS_BLOCK, in 8 or 16 bits.");
    module.def(
        "compress",
        [](Floats values, int bits, Bytes out) {
            check_compressed(values, bits, out);
            nb::gil_scoped_release unlocked;
            compress(values.data(), values.size(), bits, out.data());
        },
        "values"_a, "bits"_a, "out"_a,
        "Write floats in 8 or 16 bits each; they are left with what that has dropped.");
    module.def(
        "add_decompressed",
        [](Bytes bytes, int bits, Floats values) {
            check_compressed(values, bits, bytes);
            nb::gil_scoped_release unlocked;
            add_decompressed(bytes.data(), values.size(), bits, values.data());
        },
        "bytes"_a, "bits"_a, "values"_a, "Add what compress has written to values.");
    module.def(
        "shards",
        [](size_t size, int ranks) {
            std::vector<std::pair<size_t, size_t>> result;
            for (int r = 0; r < ranks; ++r) {
                const Shard shard = shard_of(size, sizeof(float), r, ranks);
                result.emplace_back(shard.begin, shard.count);
            }
            return result;
        },
        "size"_a, "ranks"_a, "The (begin, count) of each rank's part of the parameters.");
}

}  // namespace tagi_ddp
